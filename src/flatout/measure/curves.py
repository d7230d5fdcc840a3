"""How far apart two curves are, such as losses by step.

The relative difference of two values is |a - b| / max(|a|, |b|, f * s), where s is the largest
finite magnitude of both curves and f is 1e-3. Rounding errors are in proportion to a curve's scale,
so a value that is nearly 0 by cancellation is judged by the scale and not by what is left of it.
Two NaNs, or two equal infinities, differ by 0; where only one side is NaN or infinite, the
difference is infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.errors import DataError

_SCALE_FLOOR = 1e-3


@dataclass(frozen=True)
class CurveDifference:
    max_rel: float
    step: int | None
    first: int | None

    @property
    def words(self) -> str:
        if self.step is None:
            return "equal"
        return f"differs by up to {self.max_rel:.1e} at step {self.step}, first at {self.first}"


def compare_curves(
    a: Sequence[float] | npt.NDArray[Any],
    b: Sequence[float] | npt.NDArray[Any],
) -> CurveDifference:
    """Compares two curves, such as losses by step, as float64 of shape (steps,).

    Raises:
        DataError: if the curves are empty or of different lengths.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.ndim != 1 or first.shape != second.shape or not first.size:
        raise DataError(
            "expected two curves over the same steps, found shapes "
            f"{first.shape} and {second.shape}"
        )
    absolute = _absolute(first, second)
    relative = _relative(first, second, absolute, _SCALE_FLOOR * max(_scale(first), _scale(second)))
    if not absolute.any():
        return CurveDifference(0.0, None, None)
    step = int(relative.argmax())
    return CurveDifference(float(relative[step]), step, int(absolute.nonzero()[0][0]))


def _scale(values: npt.NDArray[Any]) -> float:
    magnitudes = np.abs(values)
    return float(magnitudes.max(initial=0.0, where=np.isfinite(magnitudes)))


def _absolute(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    with np.errstate(invalid="ignore", over="ignore"):
        distance: npt.NDArray[Any] = np.abs(a - b)
    distance[~np.isfinite(distance)] = np.inf
    distance[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    return distance


def _relative(
    a: npt.NDArray[Any], b: npt.NDArray[Any], absolute: npt.NDArray[Any], floor: float
) -> npt.NDArray[Any]:
    size = np.maximum(np.maximum(np.abs(a), np.abs(b)), floor)
    relative = np.zeros_like(absolute)
    np.divide(absolute, size, out=relative, where=(absolute > 0) & np.isfinite(absolute))
    relative[np.isinf(absolute)] = np.inf
    return relative
