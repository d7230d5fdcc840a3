"""Tables whose rows are sharded over ranks in training: ownership of rows and requests for them.

The blocks of a table are assigned to the ranks in turn. A rank requests the rows that its part of a
batch needs from their owners, and sends the gradients of these rows back. Only the owner steps a
row. A rank's work in a step thus grows with its part of the batch, not with the number of ranks.

A rank keeps its own rows in one contiguous tensor. The table and the optimizer's state keep their
shape, but their memory is released to the system. Before anyone reads a whole table, all ranks
gather its rows.
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

# Rows in a block, as a power of two. A block is small because rows that many samples use are often
# neighbors.
_SHIFT = 6
_BLOCK = 1 << _SHIFT
# Bytes of the smallest table that is sharded. Fetching rows of a smaller one takes longer than
# stepping all of its rows.
_LEAST_BYTES = 1 << 18
# Bytes of a table's rows that `gather` exchanges at a time.
_GATHERED_BYTES = 1 << 23
# Sent in place of a table's number when a rank's forward has ended.
_NO_MORE = -1
_FLOAT = 4
# Number of tables that have a bit of their own in an int64 (see `RowShards._together`).
_MOST_TOGETHER = 62


class RowRequest(NamedTuple):
    """Rows that ranks request from one another, for tables that are read by the same ids.

    Attributes:
        dealt: the rows that this rank requests.
        local: int64, places in this rank's part of the rows that all ranks request from it, in the
            order of the ranks.
        lengths: for each rank, the number of rows that it requests from this rank.
        groups: groups of `local`.
        rows: int64, the indices in the whole table of the rows of `groups`.
    """

    dealt: GroupsByRank
    local: torch.Tensor
    lengths: list[int]
    groups: Groups
    rows: torch.Tensor


class OwnedRows(Protocol):
    """Access to the rows of a table that this rank owns."""

    def read(self, local: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Return the rows at these places of this rank's part. Brings `groups` up to date first."""
        ...


class _Table(NamedTuple):
    """The partition of a table into blocks.

    Attributes:
        number: the number of the table, the same on all ranks.
        first: the rank that owns the first block; the next blocks belong to the next ranks.
        blocks: number of blocks of the table.
    """

    number: int
    first: int
    blocks: int


class RowShards:
    """Assignment of the rows of tables to ranks, with exchange of rows and gradients.

    Args:
        world: the world of this rank, with several ranks.

    Attributes:
        spread: for each table of which this rank now holds only its own rows: pairs of a tensor
            (the weights, or one of the optimizer's state) and this rank's rows of it.
        is_in_step: whether all ranks make a step, so that rows can be requested.
        lies: whether `fetch` returns zeros, for a caller that needs only the ids.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_in_step = self.lies = False
        self._takes_lookups = False
        self._tables: dict[torch.Tensor, _Table] = {}
        self._reads: dict[int, OwnedRows] = {}
        # By a table's number. `_ahead`: rows that arrived in this step. `_asked`: the requests of
        # this step. `_together`: from earlier steps, a bit for each table that was read after it by
        # the same ids.
        self._ahead: dict[int, tuple[GroupsByRank, torch.Tensor]] = {}
        self._asked: dict[int, RowRequest] = {}
        self._together: dict[int, int] = {}
        # number and rows of each table read in this step
        self._read: list[tuple[int, GroupsByRank]] = []
        # Groups of rows of this step, and the same groups ordered by owner.
        self._dealt: dict[int, tuple[Groups, GroupsByRank]] = {}
        # By table: places in this rank's part of the rows of the table's gradient.
        self._stepped: dict[torch.Tensor, torch.Tensor] = {}
        self._held = [0] * world.size  # bytes of weights of each rank
        self.spread: dict[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __contains__(self, weight: object) -> bool:
        return weight in self._tables

    def takes(self, weight: nn.Parameter) -> bool:
        """Assign the rows of a table to ranks, if it is large enough to be sharded.

        All ranks call this in the same order.
        """
        if weight in self._tables:
            return True
        row = weight.shape[1] * weight.element_size()
        if len(weight) * row < _LEAST_BYTES:
            return False
        number, ranks = len(self._tables), self.world.size
        # Tables with equal numbers of rows may be read by the same ids. They get the same owners.
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
        """Describe the bytes of weights that each rank holds."""
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
        """Return groups of a table's rows in the order of their owners (one object per step)."""
        known = self._dealt.get(id(groups))
        if known is None:
            first = self._tables[weight].first
            known = groups, table_rows.group_by_rank(groups, first, self.world.size, _SHIFT)
            self._dealt[id(groups)] = known
        return known[1]

    def owned(self, weight: torch.Tensor) -> int:
        """Return the number of a table's rows that this rank owns."""
        return self._count(self._tables[weight], len(weight), self.world.rank)

    def in_whole(self, weight: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return the indices in the whole table of rows at these places of this rank's part."""
        ranks = self.world.size
        # the first block that this rank owns
        first = (self.world.rank - self._tables[weight].first) % ranks
        skipped = (local >> _SHIFT).mul_(ranks - 1).add_(first)
        return skipped.mul_(_BLOCK).add_(local)

    def _parts(self, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        row = max(1, weight.shape[1] * weight.element_size())
        each = _BLOCK * self.world.size
        stride = max(1, _GATHERED_BYTES // (row * each)) * each
        for rows in torch.split(torch.arange(len(weight)), stride):
            yield rows, self._owners(weight, rows)

    # -- rows of other ranks -------------------------------------------------------------------

    def part(self, weight: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Copy this rank's rows to a contiguous tensor, which replaces the table until `gather`.

        Args:
            weight: the table.
            whole: its values or a tensor of the optimizer's state: contiguous, with one row for
                each row of the table.
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
        """Fill the table and its state with the rows of all ranks. All ranks call this.

        Args:
            weight: a table that is spread.
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
        """Set the object that reads this rank's rows of a table."""
        self._reads[self._tables[weight].number] = kept

    def fetch(self, weight: nn.Parameter, dealt: GroupsByRank) -> torch.Tensor:
        """Fetch rows of a table from their owners.

        All ranks call this. It also fetches the rows of other tables that the same ids read in an
        earlier step (as in a factorization machine), which saves their requests.

        Args:
            weight: the table.
            dealt: the rows that this rank needs.

        Returns:
            The rows, of shape (rows, width), in the order of `dealt`.

        Raises:
            ModelError: ranks look up rows of different tables, or different numbers of times.
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
        """Return the last request for a table, or None if this rank requested other rows."""
        asked = self._asked.get(self._tables[weight].number)
        if asked is None:
            return None
        own = asked.dealt.groups.rows
        is_same = (own.data_ptr(), len(own)) == (rows.data_ptr(), len(rows))
        return asked if is_same else None

    def last_asked(self, weight: torch.Tensor) -> RowRequest:
        """Return the last request for a table, when another rank's gradient matches it."""
        return self._asked[self._tables[weight].number]

    def is_stepped(self, weight: torch.Tensor, local: torch.Tensor) -> None:
        """Set the places in this rank's part of the rows of a table's gradient."""
        self._stepped[weight] = local

    def places(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the places in this rank's part of a gradient's rows, int64 of shape (rows,)."""
        return self._stepped[weight]

    # -- a step --------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Allow row requests in the block. All ranks run the same forward and backward in it."""
        self.is_in_step = self._takes_lookups = True
        try:
            yield
        finally:
            self.is_in_step = self._takes_lookups = False
            for known in (self._read, self._ahead, self._asked, self._dealt, self._stepped):
                known.clear()

    def end_forward(self) -> None:
        """End the lookups of this step. All ranks call this before the last backward.

        Raises:
            ModelError: another rank has one more lookup.
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
        """Raise because a table is read while its rows are on several ranks.

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
        """Refuse reads of tables whose rows no longer arrive, after an error of the ranks."""
        for weight in self.spread:
            assert isinstance(weight, nn.Parameter)
            watch_table(weight, _Elsewhere(self, weight))

    def total_norm(self, alike: torch.Tensor, own: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the 2-norm of all gradients. All ranks call this.

        Args:
            alike: the norm of the gradients that are the same on all ranks.
            own: gradients of the rows that this rank owns.
        """
        squares = torch.zeros((), dtype=torch.float64)
        for item in own:
            squares += item.double().square().sum()
        each = self.world.gather_tensors(squares, "norm of the gradients of sharded tables")
        return (alike.double().square() + torch.stack(each).sum()).sqrt().float()

    def share(self, flag: torch.Tensor) -> None:
        """Set a flag if it is set on any rank. All ranks call this."""
        each = self.world.gather_tensors(flag, "whether gradients of sharded tables are finite")
        flag.copy_(torch.stack(each).amax(0))


class _Elsewhere(NamedTuple):
    """A table watcher that refuses reads."""

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
