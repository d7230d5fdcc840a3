"""A checkpoint is written in each step."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import calls, is_each_step, kind_of, ms
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_STEPS_OF_EPOCH = 4
"""Where an epoch has no more steps than this, a save of each epoch is one of nearly each step."""


@check(lane="saving")
def look(observation: Observation) -> Findings:
    """Which lines save in most steps."""
    for call in calls(observation, "save"):
        epochs = max(
            (loader.epochs for loader in observation.loaders if loader.in_training), default=1
        )
        if not is_each_step(observation, call) or observation.steps <= _STEPS_OF_EPOCH * epochs:
            continue
        cost = None if call.seconds is None else 1e3 * call.seconds / observation.steps
        takes = "" if cost is None else f", which takes {ms(cost)} of each"
        yield Finding(
            kind=kind_of(observation, cost),
            what=f"torch.save writes in {call.steps} of {observation.steps} steps{takes}",
            do="save once an epoch, or once in so many minutes as you can afford to lose",
            where=str(call.site),
            cost_ms=cost,
            parity="bit-identical",
        )
