"""What is kept of all steps is put together again in each."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, epoch_steps, kind_of, ms
from flatout.doctor.finding import Finding
from flatout.observe import Growing, Observation

_LOOKED = 18
"""After fewer steps nothing was looked at."""


@check()
def look(observation: Observation) -> Findings:
    """Lines whose result is longer by as much with each step: their time grows likewise."""
    if observation.steps < _LOOKED:
        raise NoSignal("too few steps were seen for something to grow")
    for history in observation.growing:
        cost = _ms_now(observation, history)
        epoch = epoch_steps(observation)
        later = cost * epoch / history.at if epoch else 0.0
        words = f", {ms(later)} after an epoch" if epoch > 2 * history.at else ""
        yield Finding(
            kind=kind_of(observation, max(cost, later / 2)),
            what=f"{history.words} copies all that was kept before in each step: "
            f"{history.numbers:,} numbers after {history.at} steps, and {history.more:,} more with "
            f"each; {ms(cost)} now{words}",
            do="append to a list, and put it together once, where it is read",
            where=at(history.site),
            cost_ms=cost,
            is_estimate=True,  # it goes on growing
            parity="bit-identical",
        )


def _ms_now(history: Observation, growing: Growing) -> float:
    """What its line takes, where lines were looked at, else what the call took."""
    return max([growing.ms, *(line.ms for line in history.lines if line.site == growing.site)])
