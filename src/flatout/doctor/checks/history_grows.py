"""What is kept of all steps is put together again in each."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, epoch_steps, kind_of, ms
from flatout.doctor.finding import Finding
from flatout.observe import Growing, Observation

_LOOKED = 18
"""After fewer steps nothing was looked at."""


@check()
def look(seen: Observation) -> Findings:
    """Lines whose result is longer by as much with each step: their time grows likewise."""
    if seen.steps < _LOOKED:
        raise NoSignal("too few steps were seen for something to grow")
    for one in seen.growing:
        cost = _ms_now(seen, one)
        epoch = epoch_steps(seen)
        later = cost * epoch / one.at if epoch else 0.0
        words = f", {ms(later)} after an epoch" if epoch > 2 * one.at else ""
        yield Finding(
            kind=kind_of(seen, max(cost, later / 2)),
            what=f"{one.words} copies all that was kept before in each step: {one.numbers:,} "
            f"numbers after {one.at} steps, and {one.more:,} more with each; {ms(cost)} now{words}",
            do="append to a list, and put it together once, where it is read",
            where=at(one.site),
            cost_ms=cost,
            is_estimate=True,  # it goes on growing
            parity="bit-identical",
        )


def _ms_now(seen: Observation, one: Growing) -> float:
    """What its line takes, where lines were looked at, else what the call took."""
    return max([one.ms, *(line.ms for line in seen.lines if line.site == one.site)])
