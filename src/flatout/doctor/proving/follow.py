"""Problems that a cure causes, which the first look could not observe.

If zero_grad frees gradients, the allocator may return their memory to the system, and each step
causes page faults again. The same may happen to memory that a faster model frees. The steps of a
trial show these page faults.
"""

from __future__ import annotations

from dataclasses import replace

from flatout.doctor.checks import NoSignal
from flatout.doctor.checks.memory_returned import look
from flatout.doctor.finding import Finding
from flatout.doctor.judge import Verdict
from flatout.doctor.trials.pair import Pair


def brought_about(verdict: Verdict, pair: Pair) -> list[Finding]:
    """Return what the check of page faults finds in the steps with a cure."""
    observation = verdict.observations[0]
    blocks = [block for block in pair.blocks if block.side == "b"]
    # A job that trains with Flatout manages its memory itself.
    if not blocks or observation.framework == "flatout":
        return []
    faults = sum(block.faults for block in blocks) / sum(block.steps for block in blocks)
    steps_ms = [block.step_s * 1e3 for block in blocks]
    try:
        # Without lanes, since those of the observation belong to slower steps.
        return look(replace(observation, page_faults=faults, step_ms=steps_ms, lanes_ms={}))
    except NoSignal:
        return []
