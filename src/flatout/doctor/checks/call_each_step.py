"""A call whose value is not used takes time in each step, such as a tracker's statistics."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import calls, is_worth, ms
from flatout.doctor.edits import loops
from flatout.doctor.finding import Finding
from flatout.observe import Observation
from flatout.words import rounded

_EVERY_STEPS = 50


@check(edit=loops.call_less)
def look(seen: Observation) -> Findings:
    """Which calls steps are shorter without, and learn the same."""
    if not seen.left_out:
        if not seen.lines:
            raise NoSignal("the lines that steps spend their time in were not seen")
        return
    told = {str(call.site) for call in calls(seen, "print", "log", "save")}
    for one in seen.left_out:
        low, middle, high = one.ms()
        if not one.is_proven or not is_worth(seen, middle) or str(one.site) in told:
            continue
        share = middle / max(one.measured.step_ms, 1e-9)
        yield Finding(
            kind="slow",
            what=f"{one.words}(...) takes {ms(middle)} of each step [{rounded(low, 2)},"
            f"{rounded(high, 2)}] ({share:.0%}); it changes no weight, state or random number",
            do=f"call it every N steps: if step % {_EVERY_STEPS} == 0; or once, after the epoch",
            where=str(one.site),
            cost_ms=middle,
            parity="bit-identical",
        )
