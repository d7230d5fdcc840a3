"""Keras metrics that take longer than the step they measure: timed, and updated less often.

Some of Keras' metrics run many small operators in each update, whatever the size of the batch
(MeanIoU builds a confusion matrix). The first updates of every metric are timed along with the
steps. If a metric of Keras' own takes more than half of the rest of a step, its inputs are kept
from then on. The metric is updated with many batches at once, at the latest when its result is
read. The result is the same except for rounding, because these metrics add up sums over samples. A
slow metric of the user's own is only reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

# _SKIPPED: number of first updates that are not timed, because they build variables. _TIMED: number
# of updates timed afterwards.
_SKIPPED, _TIMED = 3, 5

Update = Callable[..., Any]


class SlowMetrics:
    """Times the compiled metrics of a model in training, and updates slow ones less often.

    Args:
        metrics: built Keras metrics.
        say: prints a line about each slow metric.
        clock: returns seconds.
        share: the maximum time of a metric before it counts as slow, as a fraction of the rest of
            the step.
        kept_bytes: the maximum bytes of targets, outputs and weights that are kept before a metric
            is updated.
    """

    def __init__(
        self,
        metrics: list[Any],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
        share: float = 0.5,
        kept_bytes: int = 64 << 20,
    ) -> None:
        self._metrics = metrics
        self._say, self._clock = say, clock
        self._share, self._kept_bytes = share, kept_bytes
        self._updates: dict[int, Update] = {n: m.update_state for n, m in enumerate(metrics)}
        self._times: dict[int, list[float]] = {n: [] for n in self._updates}
        self._steps: list[float] = []
        self._began: float | None = None
        self._kept: dict[int, list[tuple[Any, ...]]] = {}
        for number, metric in enumerate(metrics):
            vars(metric)["update_state"] = partial(self._timed, number)

    def step_begins(self) -> None:
        """Record the begin of a forward; the time between two begins is the time of a step."""
        if len(self._steps) > _SKIPPED + _TIMED or not self._times:
            return
        now = self._clock()
        if self._began is not None:
            self._steps.append(now - self._began)
        self._began = now
        if len(self._steps) == _SKIPPED + _TIMED:
            self._decide()

    def flush(self) -> None:
        """Update the metrics with all kept inputs."""
        for number, kept in self._kept.items():
            if kept:
                self._kept[number] = []
                self._updates[number](*map(_joined, zip(*kept, strict=True)))

    def forget(self) -> None:
        """Drop the kept inputs, as after a reset."""
        self._kept = {number: [] for number in self._kept}

    def close(self) -> None:
        """Update the metrics, and restore their own update method."""
        self.flush()
        for metric in self._metrics:
            vars(metric).pop("update_state", None)

    def _timed(self, number: int, *arguments: Any, **options: Any) -> Any:
        began = self._clock()
        result = self._updates[number](*arguments, **options)
        self._times[number].append(self._clock() - began)
        return result

    def _decide(self) -> None:
        step = median(self._steps[_SKIPPED:])
        for number, metric in enumerate(self._metrics):
            vars(metric).pop("update_state", None)
            times = self._times[number][_SKIPPED:]
            took = median(times) if times else 0.0
            if took <= self._share * max(step - took, 0.0):
                continue
            words = f"metric {metric.name} takes {took * 1e3:.2f} of a step's {step * 1e3:.2f} ms"
            if type(metric).__module__.startswith("keras."):
                self._kept[number] = []
                vars(metric)["update_state"] = partial(self._keep, number)
                self._say(f"{words}: it is updated with many batches at once from now on")
            else:
                self._say(f"{words}; it is your own, so it stays in the step")
        self._times = {}

    def _keep(self, number: int, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        given = (y, y_pred, sample_weight)
        plain = all(torch.is_tensor(part) for part in given if part is not None)
        if not plain or getattr(y_pred, "_keras_mask", None) is not None:
            self._updates[number](y, y_pred, sample_weight=sample_weight)
            return
        kept = self._kept[number]
        size = sum(part.nbytes for parts in kept for part in parts if part is not None)
        if kept and (size > self._kept_bytes or not _alike(kept[0], given)):
            self.flush()
        # A copy, because the source may write the next batch into the same memory.
        copied = tuple(None if part is None else part.detach().clone() for part in given)
        self._kept[number].append(copied)


def _alike(first: tuple[Any, ...], last: tuple[Any, ...]) -> bool:
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and a.shape[1:] == b.shape[1:])
        for a, b in zip(first, last, strict=True)
    )


def _joined(parts: tuple[Any, ...]) -> Any:
    return None if parts[0] is None else torch.cat(parts)
