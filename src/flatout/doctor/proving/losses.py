"""Compares losses of the same steps, to check that a script learns the same with a cure.

Changes that a cure may make depend on its parity:

- bit-identical: every loss is the same number, if the unchanged script repeats its own losses
  in each run; otherwise the rule of "redrawn" applies.
- rounding: over the first 50 steps the mean of |b - a| is at most 5% of the mean of |a|. Rounding
  errors grow from step to step, so the rule of "redrawn" applies to later steps.
- redrawn: the mean of b - a over all steps lies within three standard errors, but never beyond 10%
  of the mean of |a|; 2% always pass. The standard error comes from the means of up to eight
  stretches of steps, since neighboring losses are not independent. (Batch means: Law and Carson
  1979, "A sequential procedure for determining the length of a steady-state simulation".)

If the first batches of both sides contain the same numbers, the cure has not changed the input.
Then the cure is judged by the other changes that it may make, with "rounding" as the strictest
rule. Random draws within a model, such as dropout's, are not visible in batches.

Equal losses over some steps do not show the accuracy of a whole run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatout.doctor.trials.arm import Showed
from flatout.recipe import Parity
from flatout.words import rounded

_Array = npt.NDArray[np.float64]

_ROUNDING_STEPS, _ROUNDING = 50, 0.05
_ERRORS, _LEVEL, _MOST_LEVEL = 3.0, 0.02, 0.10
_STRETCHES = 8
# Minimum number of steps for a comparison of loss levels.
_FEWEST = 8


@dataclass(frozen=True)
class Compared:
    """Result of the comparison of the losses of both sides.

    Attributes:
        holds: True if the losses differ at most as much as the parity of the cure allows.
        parity: parity of the cure, after the comparison.
        words: description of the difference between the losses; "" without losses.
        same_batches: True if both sides read the same samples in the same order; None if unknown.
        is_equal: True if all losses are the same numbers; None if there are no losses.
    """

    holds: bool
    parity: Parity
    words: str
    same_batches: bool | None
    is_equal: bool | None


def compare(
    a: Showed, b: Showed, parity: Parity, *, is_repeatable: bool, same_input: Parity | None = None
) -> Compared:
    """Judge the losses of a script with a cure (B) against the losses without the cure (A)."""
    batches = same_batches(a, b)
    steps = min(len(a.losses), len(b.losses))
    curve, other = np.array(a.losses[:steps]), np.array(b.losses[:steps])
    if np.isnan(curve).all() and np.isnan(other).all():
        return Compared(True, parity, "", batches, None)
    is_equal = np.array_equal(curve, other, equal_nan=True)
    if is_equal:
        # Equal losses show that the cure has not changed any random draw.
        reached = Parity.EXACT if parity is Parity.REDRAWN and batches is not False else parity
        words = f"the same in all {steps} steps"
        return Compared(True, reached if is_repeatable else parity, words, batches, True)
    if same_input is not None and same_input < parity and is_same_data(a, b):
        parity = max(same_input, Parity.TOLERANT)
    if not np.array_equal(np.isfinite(curve), np.isfinite(other)):
        step = int(np.flatnonzero(np.isfinite(curve) != np.isfinite(other))[0])
        words = f"finite on one side only from step {step + 1} on"
        return Compared(False, parity, words, batches, False)
    words = f"{rounded(100 * _shift(curve, other), 2)}% apart on average over {steps} steps"
    if parity is Parity.EXACT and is_repeatable:
        return Compared(False, parity, f"{words}, not bit-identical", batches, False)
    holds = _level_holds(curve, other)
    if parity is Parity.TOLERANT and is_repeatable:
        first = slice(0, _ROUNDING_STEPS)
        holds = holds and _shift(curve[first], other[first]) <= _ROUNDING
    return Compared(holds, parity, words, batches, False)


def same_batches(a: Showed, b: Showed) -> bool | None:
    """Return True if both sides read the same samples in the same order; None if unknown."""
    pairs = [
        (value, b.batches[loader]) for loader, value in a.batches.items() if loader in b.batches
    ]
    if not pairs:
        return None
    return all(item[: len(other)] == other[: len(item)] for item, other in pairs)


def is_same_data(a: Showed, b: Showed) -> bool:
    """Return True if the first batches of every loader contain the same numbers on both sides."""
    if same_batches(a, b) is False or not a.contents or a.contents.keys() != b.contents.keys():
        return False
    pairs = [list(zip(a.contents[name], b.contents[name], strict=False)) for name in a.contents]
    return all(
        pair and all(item is not None and item == other for item, other in pair) for pair in pairs
    )


def _shift(a: _Array, b: _Array) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.nanmean(np.abs(b - a)) / _scale(a))


def _scale(a: _Array) -> float:
    sizes = np.abs(a[np.isfinite(a)])
    return max(float(sizes.mean()), 1e-3 * float(sizes.max()), 1e-300) if sizes.size else 1.0


def _level_holds(a: _Array, b: _Array) -> bool:
    difference = (b - a)[np.isfinite(a) & np.isfinite(b)]
    if len(difference) < _FEWEST:
        return False
    scale = _scale(a)
    stretches = np.array_split(difference, min(_STRETCHES, len(difference) // 2))
    means = np.array([stretch.mean() for stretch in stretches])
    error = float(means.std(ddof=1)) / len(means) ** 0.5
    allowed = max(_LEVEL * scale, min(_ERRORS * error, _MOST_LEVEL * scale))
    return bool(abs(difference.mean()) <= allowed)
