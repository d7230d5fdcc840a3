"""Check for frequent copies by copy.deepcopy, which recreates every object of a model or state."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import calls, cost_ms, is_worth, ms
from flatout.doctor.finding import Finding
from flatout.observe import Observation, Site

_OFTEN = 0.2
"""Share of steps with a copy from which on copies are too frequent to keep only the best epoch."""


@check()
def look(observation: Observation) -> Findings:
    """Report lines that take much time with copy.deepcopy."""
    seen = calls(observation, "deepcopy")
    if not (seen or observation.lines):
        raise NoSignal("the lines that steps spend their time in were not observed")
    for call in seen:
        cost = cost_ms(observation, call) or 0.0
        if call.steps >= _OFTEN * observation.steps and is_worth(observation, cost):
            often = f"is called in {call.steps:,} of {observation.steps:,} steps and takes"
            yield _finding(f"copy.deepcopy {often} {ms(cost)} of a step: ", call.site, cost)
    timed = {call.site for call in seen}
    for line in observation.lines:
        is_copy = line.words.rpartition(".")[2] == "deepcopy" and line.site not in timed
        if is_copy and is_worth(observation, line.ms):
            yield _finding(f"copy.deepcopy takes {ms(line.ms)} of a step: ", line.site, line.ms)


def _finding(words: str, site: Site, cost: float) -> Finding:
    return Finding(
        kind="slow",
        what=f"{words}each copy makes all modules, names and tensors again",
        do="copy once, and from then on write the new numbers into that copy: "
        "kept.lerp_(new, share) or kept.copy_(new), for all tensors at once "
        "torch._foreach_lerp_ or torch._foreach_copy_",
        where=str(site),
        cost_ms=cost,
        parity="bit-identical",
    )
