"""What `table_rows` does, by torch's operators, for tables on a GPU without Triton.

The same formulas as in _table_rows.c. Rows that have missed few steps are brought by the closed
form too, and nothing depends on the order in which a device's threads run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from flatout.kernels.table import Table, halves, joined

# As in _table_rows.c: the rules, the columns of a step, and those of the steps behind it.
_ADAM, _SGD, _RMSPROP, _ADAGRAD = range(4)
_STEP = (
    "rate", "root", "first", "second", "keep", "decay", "first_logs", "second_logs", "keep_logs",
    "nesterov", "first_rest", "second_rest", "scale", "within",
)  # fmt: skip
_FIRST_LOGS, _SECOND_LOGS, _KEEP_LOGS = (
    _STEP.index(f"{name}_logs") for name in ("first", "second", "keep")
)
_UPTO, _OF_WEIGHT, _OF_BUFFER, _TO_WEIGHT, _TO_BUFFER, _ROOT, _MOMENTS = range(7)
_SIZE, _REST, _NEAR = -2, -1, 3e-7
# Rows of a whole table that are brought at a time: a few tensors of them are made.
_PORTION = 1 << 20


def group(ids: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `table_rows.group`; waits for the device."""
    ids = ids.detach().reshape(-1)
    if len(ids):
        least, most = torch.stack(torch.aminmax(ids)).tolist()
        if least < 0 or most >= size:
            bad = int(((ids < 0) | (ids >= size)).nonzero()[0])
            raise IndexError(f"ids[{bad}] is {int(ids[bad])}, but the table has {size} rows")
    places = ids.argsort(stable=True)
    rows, counts = torch.unique_consecutive(ids[places], return_counts=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return rows, places, starts


def known_ids(ids: torch.Tensor, size: int, bad: torch.Tensor) -> torch.Tensor:
    """Ids as int64, with valid ones in place of those that a table has no row for.

    Args:
        ids: whole numbers of shape (places,).
        size: how many rows the table has.
        bad: int64 of shape (1,), becomes 1 where there is such an id.
    """
    ids = ids.to(torch.int64)
    known = ids.clamp(0, size - 1)
    bad.logical_or_((known != ids).any())
    return known


class SortedReads:
    """The ids that several tables were read by, sorted together.

    Args:
        reads: int64 ids of shape (places,), and how many rows the table has.
        bad: as that of `known_ids`.

    Attributes:
        numbers: of each read, which list of ids it has; several may have the same.
        rows: of each list, its rows, each once and rising.
        counts: how many these are.
        places: all places of all lists, in the order of their rows.
        starts: where the places of each row begin, and their end.
        is_bad: whether `bad` was set.
    """

    def __init__(self, reads: Sequence[tuple[torch.Tensor, int]], bad: torch.Tensor) -> None:
        lists: dict[tuple[int, int, int], tuple[torch.Tensor, int]] = {}
        self.numbers = []
        for ids, size in reads:
            key = ids.data_ptr(), len(ids), size
            lists.setdefault(key, (ids, size))
            self.numbers.append(list(lists).index(key))
        lengths, sizes = [len(ids) for ids, _ in lists.values()], [n for _, n in lists.values()]
        shifts, ends = _laid_out(tuple(lengths), tuple(sizes), bad.device)
        ids = torch.cat([ids for ids, _ in lists.values()])
        keys = (ids if shifts is None else ids + shifts).to(_narrowest(sum(sizes)))
        keys, self.places = keys.sort(stable=True)
        is_first = torch.ones_like(keys, dtype=torch.bool)
        torch.ne(keys[1:], keys[:-1], out=is_first[1:])
        numbers = is_first.cumsum(0)
        # What the host has to know, in one message.
        *until, is_bad = torch.cat([_or_zero(numbers, ends), bad]).tolist()
        self.is_bad = bool(is_bad)
        self.counts = [end - start for start, end in zip([0, *until], until, strict=False)]
        places = torch.arange(1, until[-1] + 1, device=bad.device)
        starts = torch.searchsorted(numbers, places)
        self.starts = torch.cat([starts, starts.new_full((1,), len(keys))])
        rows = keys[starts].long()
        if shifts is not None:
            rows -= shifts[self.places[starts]]
        self.rows = torch.split(rows, self.counts)
        self._lengths = lengths

    def own(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Places and starts of one list, as if it were the only one."""
        place, row = sum(self._lengths[:number]), sum(self.counts[:number])
        places = self.places[place : place + self._lengths[number]] - place
        return places, self.starts[row : row + self.counts[number] + 1] - place


@lru_cache(maxsize=8)
def _laid_out(
    lengths: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What is added to each id so that tables lie behind one another, and where lists end."""
    ends = torch.tensor(lengths, device=device).cumsum(0)
    if len(lengths) == 1:
        return None, ends
    shifts = torch.tensor([0, *accumulate(sizes)][:-1], device=device)
    each = torch.tensor(lengths, device=device)
    return shifts.repeat_interleave(each, output_size=sum(lengths)), ends


def _narrowest(rows: int) -> torch.dtype:
    """A sort takes as long as its numbers have bytes."""
    return torch.int32 if rows < 1 << 31 else torch.int64


def _or_zero(numbers: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """How many rows there are before each of these places."""
    return torch.cat([numbers.new_zeros(1), numbers])[ends]


def compacted(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, each once and rising, behind which the first one fills up; and of each id its place.

    Args:
        ids: int64 of shape (places,), as many as rows are given back.
    """
    keys, places = ids.sort(stable=True)
    numbers = torch.cat([keys.new_zeros(min(1, len(keys))), (keys[1:] != keys[:-1]).cumsum(0)])
    rows = keys[:1].expand(len(keys)).clone()
    rows[numbers] = keys
    return rows, torch.empty_like(places).scatter_(0, places, numbers)


def sum_rows(values: torch.Tensor, places: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """As `table_rows.sum_rows`."""
    if not len(places):
        return values.new_zeros(len(starts) - 1, values.shape[1])
    return torch.segment_reduce(values[places], "sum", offsets=starts, axis=0, unsafe=True)


class Passed:
    """The steps that were made, where the rows of a table are.

    Args:
        steps: float64 of shape (steps, numbers), of which row 0 is that of `base`, on the host.
        missed: float64 of shape (steps, numbers): what those behind each step do to a row.
        steps_there: the same where the tables are; there may be more.
        missed_there: the same there.
        rule: the number of one of `table_rows.RULES`.
        is_stepwise: whether steps are replayed one by one, as weight decay in gradients takes.
        base: number of the step at which all rows were.
        now: number of the last step.
    """

    def __init__(
        self,
        steps: torch.Tensor,
        missed: torch.Tensor,
        steps_there: torch.Tensor,
        missed_there: torch.Tensor,
        *,
        rule: int,
        is_stepwise: bool,
        base: int,
        now: int,
    ) -> None:
        self._rule, self._base, self._now = rule, base, now
        self._steps, self._there = steps, (steps_there, missed_there)
        is_far = missed[:, _REST] > _NEAR * missed[:, _SIZE]
        self._is_far = is_far if rule == _ADAM else torch.zeros_like(is_far)
        self._any_far = bool(self._is_far.any())
        self._is_stepwise = is_stepwise

    def bring(self, table: Table, rows: torch.Tensor | None) -> None:
        """Bring rows, of which several may be the same, to `now`; all where there is None."""
        if rows is not None:
            self._bring(table, rows)
            return
        rows = torch.arange(len(table.last), device=table.last.device)
        for part in torch.split(rows, _PORTION):
            self._bring(table, part)

    def apply(
        self, table: Table, rows: torch.Tensor, gradients: torch.Tensor, step: torch.Tensor
    ) -> None:
        """Bring rows to `now`, and make a step with gradients.

        Args:
            table: whose rows.
            rows: int64, each once.
            gradients: float32 of shape (rows, width).
            step: the numbers of the step behind `now`.
        """
        self._bring(table, rows)
        self._write(table, rows, self._one_step(table, rows, gradients, step))
        table.last[rows] = self._now + 1

    def _bring(self, table: Table, rows: torch.Tensor) -> None:
        last = table.last[rows].long()
        if self._is_stepwise:
            self._replay(table, rows, last)
            return
        at = last - self._base
        if self._any_far:
            is_far = self._is_far.to(at.device)[at]
            self._replay(table, rows[is_far], last[is_far])
            rows, at = rows[~is_far], at[~is_far]
        self._write(table, rows, self._closed(table, rows, at))
        table.last[rows] = self._now

    def _replay(self, table: Table, rows: torch.Tensor, last: torch.Tensor) -> None:
        """Step by step."""
        if not len(rows):
            return
        for number in range(int(last.min()) + 1, self._now + 1):
            behind = rows[last < number]
            step = self._steps[number - self._base]
            self._write(table, behind, self._one_step(table, behind, None, step))
        table.last[rows] = self._now

    def _closed(self, table: Table, rows: torch.Tensor, at: torch.Tensor) -> _Held:
        weights, first, second = _read(table, rows)
        steps, missed = self._there
        passed, now = missed[at], steps[self._now - self._base]
        grown = torch.exp2(now - steps[at])  # of the sums of logarithms
        upto = steps[passed[:, _UPTO].long() - self._base, _KEEP_LOGS]
        behind = torch.exp2(now[_KEEP_LOGS] - upto)

        def column(values: torch.Tensor) -> torch.Tensor:
            return values.float()[:, None]

        if self._rule == _ADAGRAD:
            return weights * column(grown[:, _KEEP_LOGS]), first, second
        if self._rule == _ADAM:
            assert first is not None
            assert second is not None
            moved = self._series(second, passed, table.epsilon) * first * column(behind)
            weights = weights * column(grown[:, _KEEP_LOGS]) - torch.where(first == 0, 0.0, moved)
            first = first * column(grown[:, _FIRST_LOGS])
            return weights, first, second * column(grown[:, _SECOND_LOGS])
        moved = weights * column(behind * passed[:, _OF_WEIGHT])
        if first is not None:
            moved = moved - column(behind * passed[:, _OF_BUFFER]) * first
            to_weight, to_buffer = column(passed[:, _TO_WEIGHT]), column(passed[:, _TO_BUFFER])
            first = to_weight * weights + to_buffer * first
        if second is not None:
            second = second * column(grown[:, _SECOND_LOGS])
        return moved, first, second

    @staticmethod
    def _series(second: torch.Tensor, passed: torch.Tensor, epsilon: float) -> torch.Tensor:
        """What Adam's missed steps move a weight by, as a multiple of its mean."""
        moments = passed[:, _MOMENTS:_SIZE].float()
        x = second.sqrt() * passed[:, _ROOT].float()[:, None]
        over = 1 / (x + epsilon)
        z = (x - epsilon) * over
        series = moments[:, -1:]
        for place in reversed(range(moments.shape[1] - 1)):
            series = series * z + moments[:, place : place + 1]
        return series * over

    def _one_step(
        self,
        table: Table,
        rows: torch.Tensor,
        gradients: torch.Tensor | None,
        step: torch.Tensor,
    ) -> _Held:
        weights, first, second = _read(table, rows)
        by = dict(zip(_STEP, step.tolist(), strict=True))
        gradient: Any = by["decay"] * weights
        gradient = gradient if gradients is None else gradient + gradients
        kept = weights * by["keep"]
        if self._rule == _ADAM:
            assert first is not None
            assert second is not None
            first = first + by["first_rest"] * (gradient - first)
            second = by["second"] * second + by["second_rest"] * gradient * gradient
            root = second.sqrt() * by["root"] + table.epsilon
            return kept - by["rate"] * first / root, first, second
        if self._rule == _ADAGRAD:
            assert first is not None
            first = first + gradient * gradient
            root = (first + by["within"]).sqrt() + table.epsilon
            return kept - by["rate"] * gradient / root, first, second
        if self._rule == _RMSPROP:
            assert second is not None
            second = by["second"] * second + by["second_rest"] * gradient * gradient
            gradient = gradient / ((second + by["within"]).sqrt() + table.epsilon)
        if first is None:
            return kept - by["rate"] * gradient, first, second
        first = by["first"] * first + by["scale"] * gradient
        moved = first
        if self._rule == _SGD and by["nesterov"]:
            moved = by["scale"] * gradient + by["first"] * first
        return kept - by["rate"] * moved, first, second

    @staticmethod
    def _write(table: Table, rows: torch.Tensor, held: _Held) -> None:
        for (whole, lower), values in zip(_parts(table), held, strict=True):
            if whole is None or values is None:
                continue
            if lower is not None:
                values, low = halves(values)
                lower.index_copy_(0, rows, low)
            whole.index_copy_(0, rows, values)


_Held = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def _parts(table: Table) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Weights and state, each with its lower half where it has one."""
    lower = table.lower or (None, None, None)
    return list(zip((table.weights, table.first, table.second), lower, strict=True))


def _read(table: Table, rows: torch.Tensor) -> _Held:
    def of(whole: torch.Tensor | None, lower: torch.Tensor | None) -> torch.Tensor | None:
        if whole is None:
            return None
        return whole[rows] if lower is None else joined(whole[rows], lower[rows])

    weights, first, second = (of(*part) for part in _parts(table))
    assert weights is not None
    return weights, first, second
