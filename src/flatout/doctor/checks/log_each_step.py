"""Check for lines that print or log in each step."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import calls, cost_ms, is_each_step, kind_of, ms
from flatout.doctor.edits import loops
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_EVERY_STEPS = 50


@check(edit=loops.tell_less)
def look(observation: Observation) -> Findings:
    """Report lines that print or log in most steps."""
    for call in calls(observation, "print", "log"):
        if not is_each_step(observation, call):
            continue
        cost = cost_ms(observation, call)
        kind = kind_of(observation, cost)
        # The logged values are computed first, on the same line.
        most = max(cost or 0.0, observation.lanes_ms.get("host") or 0.0) if kind == "slow" else cost
        # A Recipe cannot change what the script itself writes to a file.
        is_own = call.detail.get("fsync", False) and not call.detail.get("logged", False)
        takes = "" if cost is None else f", which takes {ms(cost)}"
        yield Finding(
            kind=kind,
            what=f"each step {'prints' if call.kind == 'print' else 'logs'}{takes}",
            do=f"do it every N steps: if step % {_EVERY_STEPS} == 0",
            where=str(call.site),
            cost_ms=most,
            parity="bit-identical",
            recipe={} if is_own else {"script.log_every": _EVERY_STEPS},
        )
