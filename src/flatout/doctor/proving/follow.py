"""What a cure brings about, and the first look could not see: a pitfall that comes with it.

What zero_grad drops, the allocator may give back to the system, and then each step faults it in
again; so may what a faster model lets go of. Steps of a trial show it.
"""

from __future__ import annotations

from dataclasses import replace

from flatout.doctor.checks import NoSignal
from flatout.doctor.checks.memory_returned import look
from flatout.doctor.finding import Finding
from flatout.doctor.judge import Verdict
from flatout.doctor.trials.pair import Pair


def brought_about(verdict: Verdict, pair: Pair) -> list[Finding]:
    """What a check finds in the steps with a cure."""
    observation = verdict.observations[0]
    blocks = [block for block in pair.blocks if block.side == "b"]
    # A job that trains with Flatout decides about its memory itself.
    if not blocks or observation.framework == "flatout":
        return []
    faults = sum(block.faults for block in blocks) / sum(block.steps for block in blocks)
    steps_ms = [block.step_s * 1e3 for block in blocks]
    try:
        # Its lanes are those of a slower step.
        return look(replace(observation, page_faults=faults, step_ms=steps_ms, lanes_ms={}))
    except NoSignal:
        return []
