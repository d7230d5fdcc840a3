"""Check for costly calls with unused results in each step, such as a tracker's statistics."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import calls, is_worth, ms
from flatout.doctor.edits import loops
from flatout.doctor.finding import Finding
from flatout.observe import Observation
from flatout.words import rounded

_EVERY_STEPS = 50


@check(edit=loops.call_less)
def look(observation: Observation) -> Findings:
    """Report calls without which steps are shorter and learn the same."""
    if not observation.left_out:
        if not observation.lines:
            raise NoSignal("the lines that steps spend their time in were not observed")
        return
    named_sites = {str(call.site) for call in calls(observation, "print", "log", "save")}
    for call in observation.left_out:
        low, middle, high = call.ms()
        if not call.is_proven or not is_worth(observation, middle) or str(call.site) in named_sites:
            continue
        share = middle / max(call.measured.step_ms, 1e-9)
        yield Finding(
            kind="slow",
            what=f"{call.words}(...) takes {ms(middle)} of each step [{rounded(low, 2)},"
            f"{rounded(high, 2)}] ({share:.0%}); it changes no weight, state or random number",
            do=f"call it every N steps: if step % {_EVERY_STEPS} == 0; or once, after the epoch",
            where=str(call.site),
            cost_ms=middle,
            parity="bit-identical",
        )
