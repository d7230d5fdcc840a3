"""The precision of a run whose frozen layers are kept, where its steps come too late to try it.

What frozen layers give for a sample is computed once, and that is most of a run of few steps, or
of one with short epochs: settings that are tried on the steps would cost whole epochs without
features. So a few samples tell: what their forward takes, which the first epoch takes for all, and
what their backward adds, by which later epochs are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flatout.recipe import Choice, ModelFacts, of_change
from flatout.train.auto_check import FirstCheck
from flatout.train.auto_search import Option
from flatout.words import rounded

# Looking takes as long as the forward of so many samples, of an epoch this share at most.
_LOOKED_AT, _SHARE = 24, 0.25
# An epoch of fewer steps is over before settings are judged on them.
_STEPS = 120
# The run must take so much less time.
_FASTER = 1.1
# What runs from kept features: forward and backward, where backward takes twice as long.
_LIVE = 1.5
_FIELDS = ("compute.precision", "compute.memory_format")


class PlannedRun(NamedTuple):
    """A run whose frozen layers may be computed once: samples of an epoch, and its epochs."""

    samples: int
    epochs: int


class Found(NamedTuple):
    """What a few samples have told.

    Attributes:
        choices: empty where the run stays as it is.
        why: in words; "" without choices.
        is_frozen: whether most of a step is the forward of what is kept.
    """

    choices: dict[str, Choice]
    why: str = ""
    is_frozen: bool = False


def has_short_epochs(planned: PlannedRun, batch_size: int) -> bool:
    """Whether an epoch is over before settings could be tried on its steps."""
    return planned.epochs > 1 and planned.samples < _STEPS * batch_size


def choose_precision(
    check: FirstCheck, options: Sequence[Option], facts: ModelFacts, planned: PlannedRun
) -> Found:
    """Half precision, alone or in another memory format, where that makes the run faster."""
    own = [next((option for option in options if option.field == field), None) for field in _FIELDS]
    precision, layout = own
    looks = planned.samples * _SHARE >= _LOOKED_AT and planned.epochs > 1
    if not looks:
        return Found({})
    tried: list[tuple[Option, ...]] = [] if precision is None else [(precision,)]
    if precision is not None and layout is not None:
        tried.append((precision, layout))
    least_s = check.budget.terms.least_frozen_s
    result = check.frozen_rates(tried, facts, least_s / planned.samples)
    if planned.samples * result[()][0] < least_s:
        return Found({})
    # A backward pass of all layers takes about twice as long as the forward.
    is_frozen = result[()][1] < result[()][0]
    # What makes the forward longer, which the first epoch is made of, was timed badly or is no use.
    result = {value: rate for value, rate in result.items() if not value or rate[0] < result[()][0]}
    seconds = {chosen: _run_s(forward, rest, planned) for chosen, (forward, rest) in result.items()}
    best = min(seconds, key=lambda chosen: seconds[chosen])
    ratio = seconds[()] / seconds[best]
    if not best or ratio < _FASTER:
        return Found({}, is_frozen=is_frozen)
    took, plain = (rounded(1e3 * result[chosen][0]) for chosen in (best, ()))
    why = f"the forward of the frozen layers takes {took} instead of {plain} ms a sample"
    choices = {
        item.field: Choice(
            value=item.value,
            reason=why,
            parity=of_change(item.field, "plain", item.value, facts),
            ratio=ratio,
        )
        for item in best
    }
    return Found(choices, why, is_frozen)


def _run_s(forward: float, rest: float, planned: PlannedRun) -> float:
    return forward + rest + (planned.epochs - 1) * _LIVE * rest
