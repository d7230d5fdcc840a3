"""Check for zero_grad(set_to_none=False): gradients are filled with zeros, then added to."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import calls, cost_ms, kind_of, ms
from flatout.doctor.edits import arguments
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_PASSES = 4
"""Number of passes over the gradients' memory that are saved, per pass of zero_grad itself.

zero_grad writes zeros once. backward then reads the zeros and the new gradient and writes their
sum, instead of only storing the new gradient.
"""


@check(edit=arguments.forget_gradients)
def look(observation: Observation) -> Findings:
    """Report lines that ask for zeros."""
    for call in calls(observation, "zero_grad"):
        own = cost_ms(observation, call)
        cost = None if own is None else _PASSES * own
        if call.detail.get("set_to_none") is not False:
            continue
        takes = "" if own is None else f" in {ms(own)}"
        yield Finding(
            kind=kind_of(observation, cost),
            what=f"zero_grad(set_to_none=False) writes zeros into all gradients{takes}, and "
            "backward adds to them",
            do="zero_grad(), which forgets them; see first that no code reads the zeros of "
            "parameters without a gradient",
            where=str(call.site),
            cost_ms=cost,
            is_estimate=True,
            parity="bit-identical",
            recipe={"script.zero_grad": "set_to_none"},
        )
