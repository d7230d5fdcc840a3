"""Rows of sharded tables for the next batch, fetched while this one's backward pass runs.

What the next batch reads is predicted (models/replayed.py) before the last backward pass of a step.
Beside it a thread asks the owners, which send rows as they will be after this step if it does not
touch them. Rows that it may touch, since some rank has asked for them in this step, follow in the
next step, when it is known what they are: all rows are those that would be fetched then, bit for
bit. Where a rank's next forward reads by other ids than were predicted, all ranks fetch as usual.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from threading import Thread
from typing import NamedTuple, Protocol

import torch

from flatout.kernels import Groups, GroupsByRank, table_rows
from flatout.models import InputRecording, Replayed
from flatout.world import Exchange, PendingCollective, World, to_eight

# After so many steps in a row that read by other ids nothing is predicted any more.
_MOST_WRONG = 3
_FLOAT = 4


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


class TableLookup(NamedTuple):
    """A lookup: in which table, by its number, by which ids, and what rows these are."""

    number: int
    ids: torch.Tensor
    dealt: GroupsByRank


class OwnedRows(Protocol):
    """Rows of a table that this rank owns."""

    @property
    def width(self) -> int:
        """Of a row."""
        ...

    @property
    def keeps_word(self) -> bool:
        """Whether the last step was the one that was predicted."""
        ...

    def read(self, local: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Rows by where they lie here, of which several may be the same, and those in groups."""
        ...

    def predict(self) -> bool:
        """Note what the step to come is; whether that is known."""
        ...

    def after_step(self, local: torch.Tensor) -> torch.Tensor:
        """Rows as they are after that step if it has no gradient for them."""
        ...

    def now(self, local: torch.Tensor) -> torch.Tensor:
        """Rows as they are now, which are left as they lie."""
        ...

    def bring(self, rows: torch.Tensor) -> None:
        """Rows, each once, up to date where they lie."""
        ...


class Fetched:
    """Rows for one set of ids of the next batch.

    Attributes:
        asked: what all ranks ask for; None until that is known.
        changed: of the rows that this rank needs, whether the present step may change them.
        rows: by table, those that have come, and zeros in the place of the others.
        later: where the rows lie here that ranks still have to get, and how many each.
        is_whole: whether all rows have come.
    """

    def __init__(self, numbers: Sequence[int], dealt: GroupsByRank) -> None:
        self.numbers, self.dealt = list(numbers), dealt
        self.asked: RowRequest | None = None
        self.changed = torch.empty(0, dtype=torch.bool)
        self.rows: dict[int, torch.Tensor] = {}
        self.later = (torch.empty(0, dtype=torch.int64), [0])
        self.is_whole = False


class RowsAhead:
    """Fetches rows ahead."""

    def __init__(
        self,
        world: World,
        kept: dict[int, OwnedRows],
        owned: Callable[[int, GroupsByRank, list[torch.Tensor]], RowRequest],
        following: Callable[[], Sequence[torch.Tensor] | None],
    ) -> None:
        self._world, self._kept, self._owned, self._following = world, kept, owned, following
        self._exchange: Exchange | None = None
        self._replayed: Replayed | None = None
        self._order: list[tuple[int, int]] = []  # of lookups: a table, and which set of ids
        self._wrong = 0
        self._recording: InputRecording | None = None
        self._next: list[TableLookup] = []
        self._fetched: list[Fetched] = []
        self._reads: list[TableLookup] = []  # that were predicted and are not made yet
        self._later: PendingCollective | None = None

    # -- what the next batch reads -----------------------------------------------------------

    def record(self, inputs: Sequence[torch.Tensor]) -> None:
        """From here on, see how a forward makes its ids, where that is not known."""
        if self._replayed is None and self._wrong < _MOST_WRONG:
            self._recording = InputRecording(inputs)
            self._recording.__enter__()  # type: ignore[no-untyped-call]

    def end_recording(self, reads: Sequence[TableLookup]) -> None:
        """The forward is over, or has failed."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if not reads:
            return
        sets = list({id(read.dealt): None for read in reads})
        self._order = [(read.number, sets.index(id(read.dealt))) for read in reads]
        self._replayed = recording.of([read.ids for read in reads])

    def predict(self, deal: Callable[[int, torch.Tensor], GroupsByRank]) -> int:
        """See what the next batch reads; a number that is the same on all ranks that can, or 0."""
        self._next = []
        inputs = self._following() if self._replayed is not None else None
        if inputs is None:
            return 0
        for number, _ in self._order:
            if not self._kept[number].predict():
                return 0
        assert self._replayed is not None
        try:
            ids = self._replayed(inputs)
            # Tables that are read by the same ids have the same rows.
            known: dict[int, tuple[torch.Tensor, GroupsByRank]] = {}
            for (number, which), item in zip(self._order, ids, strict=True):
                if which not in known:
                    known[which] = item, deal(number, item)
                self._next.append(TableLookup(number, *known[which]))
        except Exception:  # whatever the model's own functions raise of another batch
            self._next = []
            return 0
        return zlib.crc32(repr(self._order).encode()) or 1

    # -- fetching ----------------------------------------------------------------------------

    def begin(self, touched: dict[int, list[RowRequest]]) -> None:
        """Fetch beside the backward pass; all ranks call it."""
        if self._exchange is None:
            self._exchange = self._world.exchange_beside()
        sets: dict[int, list[TableLookup]] = {}
        for read in self._next:
            sets.setdefault(id(read.dealt), []).append(read)
        self._reads = self._next
        self._fetched = [
            Fetched(list(dict.fromkeys(read.number for read in reads)), reads[0].dealt)
            for reads in sets.values()
        ]
        work = _Work(lambda: self._fetch(touched))
        self._later = self._world.begun(work, "rows for the next batch")

    def wait(self) -> None:
        """Before a step changes rows: until they are there."""
        if self._later is not None:
            later, self._later = self._later, None
            self._world.until(later)

    def _fetch(self, touched: dict[int, list[RowRequest]]) -> None:
        assert self._exchange is not None
        ranks, own = self._world.size, self._world.rank
        counts = [count for item in self._fetched for count in item.dealt.counts]
        by_set = [torch.split(item.dealt.local, item.dealt.counts) for item in self._fetched]
        notes, come = self._exchange(counts, [list(parts) for parts in zip(*by_set, strict=True)])
        come = [item.clone() for item in come]  # good until the next exchange
        parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        starts = [0] * ranks
        for place, item in enumerate(self._fetched):
            ids = []
            for rank in range(ranks):
                end = starts[rank] + 8 * notes[rank][place * ranks + own]
                ids.append(come[rank][starts[rank] : end].view(torch.int64))
                starts[rank] = end
            item.asked = self._owned(item.numbers[0], item.dealt, ids)
            for part, more in zip(parts, self._rows_of(item, touched), strict=True):
                part += more
        _, come = self._exchange([], parts)
        starts = [0] * ranks
        for item in self._fetched:
            self._take(item, come, starts)

    def _rows_of(
        self, fetched: Fetched, touched: dict[int, list[RowRequest]]
    ) -> list[list[torch.Tensor]]:
        asked = fetched.asked
        assert asked is not None
        there = [other.groups.rows for n in fetched.numbers for other in touched.get(n, ())]
        may_change = _are_in(asked.groups.rows, there)
        numbers = table_rows.numbers_in(asked.groups)
        changed = may_change[numbers]
        place = (~may_change).cumsum(0).sub_(1)[numbers]
        by_rank = torch.split(changed, asked.lengths)
        fetched.later = asked.local[changed], [int(own.sum()) for own in by_rank]
        parts = [[own.to(torch.uint8)] for own in by_rank]
        others = asked.groups.rows[~may_change]
        for number in fetched.numbers:
            values = self._kept[number].after_step(others)
            for part, own, at in zip(
                parts, by_rank, torch.split(place, asked.lengths), strict=True
            ):
                part.append(values.index_select(0, at[~own]))
        return parts

    def _take(self, fetched: Fetched, come: Sequence[torch.Tensor], starts: list[int]) -> None:
        """Put what has come in place; `starts`: from where on, by rank."""
        counts = fetched.dealt.counts
        changed = []
        for rank, count in enumerate(counts):
            changed.append(come[rank][starts[rank] : starts[rank] + count].bool())
            starts[rank] += to_eight(count)
        fetched.changed = torch.cat(changed)
        fresh = [int((~own).sum()) for own in changed]
        for number in fetched.numbers:
            fetched.rows[number] = self._block(
                fetched, number, ~fetched.changed, fresh, come, starts
            )

    def _block(
        self,
        fetched: Fetched,
        number: int,
        where: torch.Tensor,
        counts: Sequence[int],
        come: Sequence[torch.Tensor],
        starts: list[int],
    ) -> torch.Tensor:
        width, parts = self._kept[number].width, []
        for rank, count in enumerate(counts):
            size = count * width * _FLOAT
            bytes_ = come[rank][starts[rank] : starts[rank] + size]
            parts.append(bytes_.view(torch.float32).view(count, width))
            starts[rank] += to_eight(size)
        rows = fetched.rows.get(number)
        if rows is None:
            rows = torch.zeros(len(fetched.dealt.local), width)
        rows[where] = torch.cat(parts)
        return rows

    # -- the next step -----------------------------------------------------------------------

    @property
    def is_there(self) -> bool:
        """Whether rows were fetched that no lookup has had yet; the same on all ranks."""
        return any(not item.is_whole for item in self._fetched)

    def dealt_of(self, number: int, ids: torch.Tensor) -> GroupsByRank | None:
        """The rows of ids, where the next lookup was predicted to be this one."""
        if not self._reads:
            return None
        read = self._reads.pop(0)
        is_same = read.number == number and read.ids.shape == ids.shape
        if is_same and torch.equal(read.ids.to(ids.dtype), ids):
            return read.dealt
        self._reads = []
        return None

    def changed_for(self, dealt: GroupsByRank) -> tuple[bool, list[list[torch.Tensor]]]:
        """Whether a lookup of these rows is the one that was predicted, and what ranks are to get.

        That are the rows of it that have changed since.
        """
        result = next(item for item in self._fetched if not item.is_whole)
        assert result.asked is not None
        if not all(self._kept[number].keeps_word for number in result.numbers):
            return False, [[] for _ in range(self._world.size)]
        local, lengths = result.later
        parts: list[list[torch.Tensor]] = [[] for _ in lengths]
        for number in result.numbers:
            values = self._kept[number].now(local)
            for part, own in zip(parts, torch.split(values, lengths), strict=True):
                part.append(own)
        return dealt is result.dealt, parts

    def patch(self, come: Sequence[torch.Tensor]) -> Fetched:
        """Put rows in place that have changed since; that set of rows is whole."""
        result = next(item for item in self._fetched if not item.is_whole)
        starts = [0] * len(come)
        counts = [int(own.sum()) for own in torch.split(result.changed, result.dealt.counts)]
        assert result.asked is not None
        for number in result.numbers:
            self._block(result, number, result.changed, counts, come, starts)
            # As a fetch does: at which steps rows are brought decides how they are rounded.
            self._kept[number].bring(result.asked.groups.rows)
        result.is_whole = True
        self._wrong = 0
        return result

    def drop(self, *, wrong: bool = False) -> None:
        """Fetch again what was fetched."""
        self._fetched, self._reads = [], []
        if wrong:
            self._wrong += 1
            self._replayed = None


class _Work:
    """What a thread does."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="flatout-rows-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._do()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def _are_in(rows: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
    result = torch.zeros(len(rows), dtype=torch.bool)
    for item in others:
        if len(item):
            places = torch.searchsorted(item, rows).clamp_(max=len(item) - 1)
            result |= item[places] == rows
    return result
