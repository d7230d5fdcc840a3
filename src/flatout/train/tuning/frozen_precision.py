"""The precision of a run with frozen layers, if its steps come too late to try precisions on.

The outputs of frozen layers are computed once per sample, which is most of the work of a run of few
steps or short epochs. Trying settings on the steps would then cost whole epochs without features.
So a few samples are measured: the forward shows the time of the first epoch, and the added backward
the time of later epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flatout.recipe import Choice, ModelFacts, of_change
from flatout.train.tuning.first_check import FirstCheck
from flatout.train.tuning.search import Option
from flatout.words import rounded

# _LOOKED_AT: number of samples whose forward takes as long as the check. _SHARE: maximum cost of
# the check, as a fraction of the samples of an epoch.
_LOOKED_AT, _SHARE = 24, 0.25
# Minimum number of steps of an epoch in which settings can be tried on the steps.
_STEPS = 120
# Minimum ratio of the run's estimated times (plain / other) for which another precision is chosen.
_FASTER = 1.1
# Time of a step on kept features, as a multiple of its backward; the forward takes half as long.
_LIVE = 1.5
_FIELDS = ("compute.precision", "compute.memory_format")


class PlannedRun(NamedTuple):
    """A run whose frozen layers may be computed once: samples per epoch, number of epochs."""

    samples: int
    epochs: int


class Found(NamedTuple):
    """The decision from measurements of a few samples.

    Attributes:
        choices: the chosen settings; empty if the run stays as it is.
        why: the reason in words; "" without choices.
        is_frozen: whether most of a step's time is the forward of frozen layers.
    """

    choices: dict[str, Choice]
    why: str = ""
    is_frozen: bool = False


def has_short_epochs(planned: PlannedRun, batch_size: int) -> bool:
    """Return whether an epoch has too few steps to try settings on them."""
    return planned.epochs > 1 and planned.samples < _STEPS * batch_size


def choose_precision(
    check: FirstCheck, options: Sequence[Option], facts: ModelFacts, planned: PlannedRun
) -> Found:
    """Choose half precision, alone or with another memory format, if the run becomes faster."""
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
    # If all layers trained, backward would take about twice as long as forward.
    is_frozen = result[()][1] < result[()][0]
    # Options with a slower forward are left out: the forward dominates the first epoch.
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
