"""Tables whose rows lie on several ranks while they train: who owns which, and who asks for them.

Blocks of rows go round the ranks. A rank reads the rows that its part of a batch needs from their
owners, and sends their gradients back; the owner alone steps a row. So what a rank does in a step
grows with its part of the batch and not with the number of ranks.

A rank keeps its rows beside one another. The table and the optimizer's state keep their shape, but
their memory is given back to the system. Where someone reads a table whole, all ranks give one
another their rows first.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_
from typing import NamedTuple, Protocol

import torch
from torch import nn

from flatout.devices import huge_pages
from flatout.errors import ModelError
from flatout.kernels import Groups, GroupsByRank, table_rows
from flatout.models import Lookup, watch_table
from flatout.words import size_words
from flatout.world import World, to_eight

# Rows in a block, as a power of two: few, for rows that many samples use are often beside one
# another.
_SHIFT = 6
_BLOCK = 1 << _SHIFT
# A smaller table stays on every rank: asking for its rows takes longer than stepping them.
_LEAST_BYTES = 1 << 18
# What ranks tell one another at a time of rows that all are to have.
_GATHERED_BYTES = 1 << 23
# In the place of a table's number: a forward is over.
_NO_MORE = -1
_FLOAT = 4
# As many tables have their own bit in an int64.
_MOST_TOGETHER = 62


class RowRequest(NamedTuple):
    """Rows that ranks ask one another for, of tables that are read by the same ids.

    Attributes:
        dealt: those that this rank asks for.
        local: int64, where those lie here that all ranks ask this one for, rank after rank.
        lengths: how many each rank asks this one for.
        groups: of `local`.
        rows: int64, the rows of `groups` in the whole table.
    """

    dealt: GroupsByRank
    local: torch.Tensor
    lengths: list[int]
    groups: Groups
    rows: torch.Tensor


class OwnedRows(Protocol):
    """Rows of a table that this rank owns."""

    def read(self, local: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Rows that lie here at these places; those of `groups` are brought up to date."""
        ...


class _Table(NamedTuple):
    """How a table is cut.

    Attributes:
        number: of the table, the same on all ranks.
        first: the rank of its first block; the next blocks are the next ranks'.
        blocks: of it.
    """

    number: int
    first: int
    blocks: int


class RowShards:
    """Which rank owns which row of which table.

    Args:
        world: of this rank, of several.

    Attributes:
        spread: of tables of which this rank has nothing but its own rows now, the weights and the
            tensors of the optimizer's state, each with this rank's rows of it.
        is_in_step: whether all ranks make a step, so that rows can be asked for.
        lies: whether rows that lie elsewhere are zeros, for someone who looks only at ids.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_in_step = self.lies = False
        self._takes_lookups = False
        self._tables: dict[torch.Tensor, _Table] = {}
        self._reads: dict[int, OwnedRows] = {}
        # By a table's number: of this step, rows that have come, and who has asked for which; of
        # earlier ones, a bit for each table that was read by the same ids after it.
        self._ahead: dict[int, tuple[GroupsByRank, torch.Tensor]] = {}
        self._asked: dict[int, RowRequest] = {}
        self._together: dict[int, int] = {}
        self._read: list[tuple[int, GroupsByRank]] = []  # tables by number, and their rows
        # Of this step: groups of rows, and the same by owner.
        self._dealt: dict[int, tuple[Groups, GroupsByRank]] = {}
        # Where the rows of a table's gradient lie here.
        self._stepped: dict[torch.Tensor, torch.Tensor] = {}
        self._held = [0] * world.size  # bytes of weights, by rank
        self.spread: dict[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __contains__(self, weight: object) -> bool:
        return weight in self._tables

    def takes(self, weight: nn.Parameter) -> bool:
        """Shard a table, if it is large enough; all ranks ask in the same order."""
        if weight in self._tables:
            return True
        row = weight.shape[1] * weight.element_size()
        if len(weight) * row < _LEAST_BYTES:
            return False
        number, ranks = len(self._tables), self.world.size
        # Tables of as many rows may be read by the same ids, which then have the same owners.
        alike = [table.first for value, table in self._tables.items() if len(value) == len(weight)]
        blocks = -(-len(weight) // _BLOCK)
        starts = [_Table(number, first, blocks) for first in alike[:1] or range(ranks)]
        held = {start: self._held_with(start, len(weight), row) for start in starts}
        best = min(starts, key=lambda value: max(held[value]) - min(held[value]))
        self._tables[weight], self._held = best, held[best]
        return True

    def _held_with(self, table: _Table, rows: int, row: int) -> list[int]:
        return [held + self._count(table, rows, rank) * row for rank, held in enumerate(self._held)]

    def words(self) -> str:
        """How many bytes of weights each rank holds."""
        if not self._tables:
            return f"too small to be sharded over {self.world.size} ranks"
        least, most = size_words(min(self._held)), size_words(max(self._held))
        each = least if least == most else f"{least} to {most}"
        return f"sharded over {self.world.size} ranks, {each} of weights on each"

    # -- who owns what -----------------------------------------------------------------------

    def _owners(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        table = self._tables[weight]
        return rows.div(_BLOCK, rounding_mode="floor").add_(table.first) % self.world.size

    def dealt(self, weight: torch.Tensor, groups: Groups) -> GroupsByRank:
        """Groups of a table's rows in the order of their owners; the same object in a step."""
        known = self._dealt.get(id(groups))
        if known is None:
            first = self._tables[weight].first
            known = groups, table_rows.group_by_rank(groups, first, self.world.size, _SHIFT)
            self._dealt[id(groups)] = known
        return known[1]

    def owned(self, weight: torch.Tensor) -> int:
        """How many of a table's rows this rank owns."""
        return self._count(self._tables[weight], len(weight), self.world.rank)

    def in_whole(self, weight: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Which rows of the whole table those are that lie here at these places."""
        ranks = self.world.size
        first = (self.world.rank - self._tables[weight].first) % ranks  # of this rank's blocks
        skipped = (local >> _SHIFT).mul_(ranks - 1).add_(first)
        return skipped.mul_(_BLOCK).add_(local)

    def _parts(self, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        row = max(1, weight.shape[1] * weight.element_size())
        each = _BLOCK * self.world.size
        stride = max(1, _GATHERED_BYTES // (row * each)) * each
        for rows in torch.split(torch.arange(len(weight)), stride):
            yield rows, self._owners(weight, rows)

    # -- rows that lie elsewhere ---------------------------------------------------------------

    def part(self, weight: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows, beside one another: from now on, until `gather`, they are those here.

        Args:
            weight: of the table.
            whole: its values, or the optimizer's: contiguous, with a row for each of the table's.
        """
        held = self.spread.setdefault(weight, [])
        for other, part in held:
            if other.data_ptr() == whole.data_ptr():
                return part
        count, at = self.owned(weight), 0
        part = huge_pages.empty(torch.Size([count, whole.shape[1]]))
        for rows, owners in self._parts(weight):
            own = rows[owners == self.world.rank]
            torch.index_select(whole, 0, own, out=part[at : at + len(own)])
            at += len(own)
        held.append((whole, part))
        _give_back(whole)
        return part

    def _count(self, table: _Table, rows: int, rank: int) -> int:
        own = range((rank - table.first) % self.world.size, table.blocks, self.world.size)
        is_last_short = table.blocks - 1 in own
        return len(own) * _BLOCK - is_last_short * (table.blocks * _BLOCK - rows)

    def gather(self, weight: torch.Tensor) -> None:
        """Fill the table and its state in with the rows of all ranks; all of them call it.

        Args:
            weight: of the table, which is spread.
        """
        for whole, part in self.spread[weight]:
            at = 0
            for rows, owners in self._parts(weight):
                by_rank = [rows[owners == rank] for rank in range(self.world.size)]
                length = len(by_rank[self.world.rank])
                sent = part.new_zeros(max(map(len, by_rank)), part.shape[1])
                sent[:length] = part[at : at + length]
                at += length
                result = self.world.gather_tensors(sent, "rows of a sharded table")
                for theirs, values in zip(by_rank, result, strict=True):
                    whole[theirs] = values[: len(theirs)]
        del self.spread[weight]

    def reads(self, weight: nn.Parameter, kept: OwnedRows) -> None:
        """Say what gives rows of a table that lie here."""
        self._reads[self._tables[weight].number] = kept

    def fetch(self, weight: nn.Parameter, dealt: GroupsByRank) -> torch.Tensor:
        """Rows of a table from their owners, of shape (rows, width), in the order of `dealt`.

        All ranks call it. With the rows come those of other tables that were read by the same ids
        in an earlier step, as a factorization machine's are, so that these need not be asked for.

        Args:
            weight: of the table.
            dealt: the rows that this rank needs.

        Raises:
            ModelError: ranks look up rows of different tables, or not equally often.
        """
        if self.lies:
            return torch.zeros(len(dealt.local), weight.shape[1])
        self._check_step(weight)
        number = self._tables[weight].number
        self._note(number, dealt)
        known, ahead = self._ahead.get(number, (None, None))
        if ahead is not None and known is dealt:
            return ahead
        own = list(torch.split(dealt.local, dealt.counts))
        together, come = self._say(number, self._together.get(number, 0), [[o] for o in own])
        asked = self._owned_of(number, dealt, [item.view(torch.int64) for item in come])
        weights = list(self._tables)
        wanted = [number, *(bit for bit in _bits(together) if weights[bit] in self.spread)]
        for item, rows in zip(wanted, self._rows_for(asked, wanted), strict=True):
            self._ahead[item], self._asked[item] = (dealt, rows), asked
        return self._ahead[number][1]

    def _owned_of(self, number: int, dealt: GroupsByRank, ids: list[torch.Tensor]) -> RowRequest:
        weight, local = list(self._tables)[number], torch.cat(ids)
        groups = table_rows.group(local, self.owned(weight))
        rows = self.in_whole(weight, groups.rows)
        return RowRequest(dealt, local, [len(item) for item in ids], groups, rows)

    def _rows_for(self, asked: RowRequest, wanted: list[int]) -> list[torch.Tensor]:
        parts: list[list[torch.Tensor]] = [[] for _ in asked.lengths]
        for item in wanted:
            values = self._reads[item].read(asked.local, asked.groups)
            for part, own in zip(parts, torch.split(values, asked.lengths), strict=True):
                part.append(own)
        widths = [values.shape[1] for values in parts[0]]
        counts = asked.dealt.counts
        sizes = [[count * width * _FLOAT for width in widths] for count in counts]
        lengths = [sum(map(to_eight, of_owner)) for of_owner in sizes]
        _, come = self.world.exchange([], parts, "rows of sharded tables", lengths=lengths)
        result: list[list[torch.Tensor]] = [[] for _ in wanted]
        for bytes_, of_owner, count in zip(come, sizes, counts, strict=True):
            at = 0
            for rows, size, width in zip(result, of_owner, widths, strict=True):
                rows.append(bytes_[at : at + size].view(torch.float32).view(count, width))
                at += to_eight(size)
        return [torch.cat(rows) for rows in result]

    def _note(self, number: int, dealt: GroupsByRank) -> None:
        for other, theirs in self._read:
            if theirs is dealt and other != number and number < _MOST_TOGETHER:
                self._together[other] = self._together.get(other, 0) | 1 << number
        self._read.append((number, dealt))

    def _say(
        self, number: int, together: int, parts: list[list[torch.Tensor]]
    ) -> tuple[int, list[torch.Tensor]]:
        each, come = self.world.exchange([number, together], parts, "lookups in sharded tables")
        if any(theirs != number for theirs, _ in each):
            names = dict(enumerate(tuple(weight.shape) for weight in self._tables))
            reads = ", ".join(
                f"rank {rank} reads {names.get(theirs, 'no more')}"
                for rank, (theirs, _) in enumerate(each)
            )
            raise ModelError(
                "ranks look up rows of tables in different orders or not equally often, which "
                "world.tables=sharded cannot wait for",
                where=reads,
                do="look up the same tables in each forward, whatever the samples are, or train "
                "with world.tables=replicated",
            )
        return reduce(and_, (theirs for _, theirs in each)), come

    # -- gradients -----------------------------------------------------------------------------

    def asked_for(self, weight: torch.Tensor, rows: torch.Tensor) -> RowRequest | None:
        """What ranks have asked for last, where this rank asked for these rows; else None."""
        asked = self._asked.get(self._tables[weight].number)
        if asked is None:
            return None
        own = asked.dealt.groups.rows
        is_same = (own.data_ptr(), len(own)) == (rows.data_ptr(), len(rows))
        return asked if is_same else None

    def last_asked(self, weight: torch.Tensor) -> RowRequest:
        """The same, where another rank has found that its gradient has the rows it asked for."""
        return self._asked[self._tables[weight].number]

    def is_stepped(self, weight: torch.Tensor, local: torch.Tensor) -> None:
        """Say where those rows lie here that a table's gradient has."""
        self._stepped[weight] = local

    def places(self, weight: torch.Tensor) -> torch.Tensor:
        """Where the rows of a table's gradient lie here, int64 of shape (rows,)."""
        return self._stepped[weight]

    # -- a step --------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within, all ranks run the same forward and backward."""
        self.is_in_step = self._takes_lookups = True
        try:
            yield
        finally:
            self.is_in_step = self._takes_lookups = False
            for known in (self._read, self._ahead, self._asked, self._dealt, self._stepped):
                known.clear()

    def end_forward(self) -> None:
        """No more lookups come in this step; all ranks call it before the last backward.

        Raises:
            ModelError: another rank has one more.
        """
        self._say(_NO_MORE, 0, [[] for _ in range(self.world.size)])
        self._takes_lookups = False

    def _check_step(self, weight: nn.Parameter) -> None:
        if not self.is_in_step:
            self.refuse(weight)
        if not self._takes_lookups:
            raise ModelError(
                f"the backward pass looks up rows of a table {tuple(weight.shape)} whose rows lie "
                "on several ranks",
                do="train with world.tables=replicated, or without activation checkpointing",
            )

    def refuse(self, weight: nn.Parameter) -> None:
        """Someone reads a table while its rows lie on several ranks.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            f"a table {tuple(weight.shape)} is read whole, or between steps, while its rows lie "
            f"on {self.world.size} ranks",
            do="read weights at the end of an epoch or after the fit, where every rank has all "
            "rows, or train with world.tables=replicated",
        )

    def keep_from_reads(self) -> None:
        """Refuse reads of tables whose rows will not come any more: the ranks did not end well."""
        for weight in self.spread:
            assert isinstance(weight, nn.Parameter)
            watch_table(weight, _Elsewhere(self, weight))

    def total_norm(self, alike: torch.Tensor, own: Sequence[torch.Tensor]) -> torch.Tensor:
        """The 2-norm of all gradients; all ranks call it.

        Args:
            alike: that of gradients which are the same on all ranks.
            own: gradients of the rows that this rank owns.
        """
        squares = torch.zeros((), dtype=torch.float64)
        for item in own:
            squares += item.double().square().sum()
        each = self.world.gather_tensors(squares, "norm of the gradients of sharded tables")
        return (alike.double().square() + torch.stack(each).sum()).sqrt().float()

    def share(self, flag: torch.Tensor) -> None:
        """Let a flag be set where any rank has set it; all ranks call it."""
        each = self.world.gather_tensors(flag, "whether gradients of sharded tables are finite")
        flag.copy_(torch.stack(each).amax(0))


class _Elsewhere(NamedTuple):
    """Refuses reads of a table."""

    shards: RowShards
    weight: nn.Parameter

    def by_rows(self, ids: torch.Tensor) -> Lookup | None:
        self.shards.refuse(self.weight)
        return None

    def whole(self) -> None:
        self.shards.refuse(self.weight)


def _bits(number: int) -> list[int]:
    return [place for place in range(number.bit_length()) if number >> place & 1]


def _give_back(tensor: torch.Tensor) -> None:
    if _madvise is None:
        return
    page, start = mmap.PAGESIZE, tensor.data_ptr()
    first, end = -(-start // page) * page, (start + tensor.nbytes) // page * page
    if end > first:
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
