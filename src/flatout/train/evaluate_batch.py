"""Finds the batch size at which an evaluation runs fastest, on its own batches.

Batches are joined or split from block to block, in the order A B B A. Each sample is evaluated once
and in order, so measuring adds no pass, and no forward except one of a few samples. The result is
used for later passes over batches of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.data import Batch, map_tensors, named_tensors, tensors_in
from flatout.measure import TrialResult, available_bytes, finish_device, quadruples
from flatout.train.micro_batch import is_out_of_memory
from flatout.train.terms import TERMS

# _STEP: factor between two batch sizes that are compared. _FEWEST, _MOST: minimum and maximum batch
# size.
_STEP, _FEWEST, _MOST = 4, 8, 4096
# Maximum fraction of the free memory for all values that a forward makes.
_SHARE = 0.25
# A single round of four blocks is enough if the ratio of times exceeds this value plus three times
# the noise.
_CLEAR = 1.5
# _LEAST_GAIN: minimum gain that counts, as a fraction of the time. _TOLD: minimum ratio of times
# that is reported.
_LEAST_GAIN, _TOLD = 0.02, 1.1
# Number of samples in the check whether a sample's output depends on other samples.
_FEW = 16
# Maximum difference of outputs under autocast, as a fraction of the largest value, that counts as
# rounding.
_HALF_ROUNDING = 0.02

Run = Callable[[Batch], Any]


class EvaluateBatch:
    """Chooses the batch size of evaluations.

    Attributes:
        trials: the measurements as plain data: sizes a and b, and time a / time b with its
            interval.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        clock: Callable[[], float] = perf_counter,
        worth_s: float = TERMS.worth_s,
    ) -> None:
        self.trials: list[dict[str, Any]] = []
        self._tell, self._clock, self._worth_s = tell, clock, worth_s
        self._searches: dict[Any, _Search] = {}
        self._latest: _Search | None = None

    @property
    def is_measuring(self) -> bool:
        """Whether the latest batches were part of a measurement."""
        latest = self._latest
        return latest is not None and latest.trials is not None and not latest.is_over

    def over(self, batches: Iterable[Batch], run: Run) -> Iterator[Batch]:
        """Return the same samples in the same order, in batches of the current size."""
        iterator = iter(batches)
        first = next(iterator, None)
        if first is None:
            return
        if first.is_jagged:
            yield from chain([first], iterator)
            return
        search = self._searches.setdefault(_kind(first), _Search(first.size))
        self._latest = search
        iterator = chain([first], iterator)
        while taken := _take(iterator, search.block):
            if search.is_over and len(taken) == 1 and taken[0].size == search.size:
                yield taken[0]
                continue
            size, began = search.size, self._clock()
            yield from rebatched(taken, size)
            if not search.is_over:
                finish_device()
                samples = sum(batch.size for batch in taken)
                self._count(search, taken, samples, self._clock() - began, run)

    def _count(
        self, search: _Search, taken: list[Batch], samples: int, seconds: float, run: Run
    ) -> None:
        if search.trials is None:
            search.spent_s += seconds
            if search.spent_s >= self._worth_s:
                search.begin(_bytes_where_it_fits(run, taken[0]))
        elif samples >= search.block:
            search.send(seconds / samples)
        if search.is_over:
            self._settle(search)

    def _settle(self, search: _Search) -> None:
        self.trials += search.compared
        won = [item for item in search.compared if item["chosen"] == "b"]
        gain = 1.0
        for item in won:
            gain *= item["ratio"]
        if gain >= _TOLD:
            self._tell(
                f"evaluation takes {search.size:,} samples at a time: measured faster than "
                f"{search.given:,}"
            )


class _Search:
    """A search for the fastest batch size, starting at the given size.

    Attributes:
        given: number of samples in a batch of the source.
        size: samples per batch in the next block.
        block: number of samples in the next block.
        spent_s: seconds of evaluation before the search began.
        trials: generator that yields the size of the next block, and is sent seconds per sample.
        compared: the measurements, as plain data.
        is_over: whether the search has ended, with `size` as the result.
    """

    def __init__(self, given: int) -> None:
        self.given = self.size = self.block = given
        self.spent_s = 0.0
        self.trials: Generator[int, float, int] | None = None
        self.compared: list[dict[str, Any]] = []
        self.is_over = False

    def begin(self, sample_bytes: int | None) -> None:
        if sample_bytes is None:
            self.is_over = True
            return
        most = int(_SHARE * available_bytes() / max(1, sample_bytes))
        self.trials = self._sizes(min(_MOST, most))
        self._next(lambda: next(self.trials))  # type: ignore[arg-type]

    def send(self, seconds: float) -> None:
        self._next(lambda: self.trials.send(seconds))  # type: ignore[union-attr]

    def _next(self, ask: Callable[[], int]) -> None:
        try:
            self.size = ask()
        except StopIteration as end:
            self.is_over = True
            self.size = end.value
            self.block = max(self.given, self.size)

    def _sizes(self, most: int) -> Generator[int, float, int]:
        best = self.given
        while (size := best * _STEP) <= most and (yield from self._is_faster(best, size)):
            best = size
        if best == self.given:
            while (size := best // _STEP) >= _FEWEST and (yield from self._is_faster(best, size)):
                best = size
        return best

    def _is_faster(self, a: int, b: int) -> Generator[int, float, bool]:
        self.block = max(a, b, self.given)
        result = yield from quadruples(a, b, max_pairs=4, floor=_LEAST_GAIN, enough=_is_clear)
        wins = result.wins or (result.pairs == 1 and result.ratio > _clear_from(result))
        self.compared.append({"a": a, "b": b, **result.figures, "chosen": "b" if wins else "a"})
        return wins


def _is_clear(result: TrialResult) -> bool:
    return max(result.ratio, 1 / result.ratio) > _clear_from(result)


def _clear_from(result: TrialResult) -> float:
    return _CLEAR + 3 * result.floor


# -- batches -------------------------------------------------------------------------------------


def _take(batches: Iterator[Batch], samples: int) -> list[Batch]:
    taken: list[Batch] = []
    while samples > 0 and (batch := next(batches, None)) is not None:
        taken.append(batch)
        samples -= batch.size
    return taken


def rebatched(batches: list[Batch], size: int) -> Iterator[Batch]:
    """Return the samples in batches of `size`: join small batches if possible, split large ones."""
    group: list[Batch] = []
    for batch in batches:
        if group and not (
            sum(item.size for item in group) + batch.size <= size and _can_join(group[-1], batch)
        ):
            yield _joined(group)
            group = []
        if batch.size > size and not batch.is_jagged:
            yield from (batch.rows(at, at + size) for at in range(0, batch.size, size))
        else:
            group.append(batch)
    if group:
        yield _joined(group)


def _kind(batch: Batch) -> Any:
    return batch.size, _rows_of(batch)


def _rows_of(batch: Batch) -> list[Any] | tuple[Any, ...]:
    return tuple(
        (name, t.dtype, t.device, tuple(t.shape[1:])) for name, t in named_tensors("", batch[:4])
    )


def _can_join(before: Batch, batch: Batch) -> bool:
    alone = all(
        item.copies == 1 and not item.is_copy and not item.whole and not item.is_jagged
        for item in (before, batch)
    )
    return alone and not before.padding and _rows_of(before) == _rows_of(batch)


def _joined(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    columns = [[t for _, t in named_tensors("", batch[:4])] for batch in batches]
    tensors = iter([torch.cat(column) for column in zip(*columns, strict=True)])
    inputs, targets, weight, indices = map_tensors(lambda _: next(tensors), batches[0][:4])
    return batches[-1]._replace(
        inputs=inputs,
        targets=targets,
        weight=weight,
        indices=indices,
        size=sum(batch.size for batch in batches),
    )


# -- the model -----------------------------------------------------------------------------------


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts the bytes of all values that operators return."""

    bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.bytes += sum(tensor.nbytes for tensor in tensors_in(made))
        return made


def _bytes_where_it_fits(run: Run, batch: Batch) -> int | None:
    try:
        return bytes_of_sample(run, batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def bytes_of_sample(run: Run, batch: Batch) -> int | None:
    """Return the bytes of all values that a forward makes per sample.

    Returns None if a sample's output depends on other samples.
    """
    if batch.is_jagged:
        return None
    few = batch.rows(0, _FEW)
    if few.size < 2:
        return None
    half = few.rows(0, few.size // 2)
    with _Counting() as counted:  # type: ignore[no-untyped-call]
        together = tensors_in(run(few))
    alone = tensors_in(run(half))
    if not alone or len(alone) != len(together):
        return None
    for a, b in zip(alone, together, strict=True):
        if a.dim() == 0 or len(b) != few.size or not are_close(a, b[: half.size]):
            return None
    return int(counted.bytes) // few.size


def are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether outputs differ by rounding only, relative to the largest value."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    rounding = torch.finfo(a.dtype).eps ** 0.5
    if torch.is_autocast_enabled(a.device.type):
        rounding = max(rounding, _HALF_ROUNDING)
    finite = b[b.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    # Infinities of the same sign, such as from a mask, are equal; so are NaN.
    return torch.allclose(a, b, rtol=0.0, atol=rounding * largest, equal_nan=True)
