"""A model, a state or a table is copied by copy.deepcopy, which makes everything in it again."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import is_worth, ms
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Which lines spend a share of the steps in copy.deepcopy."""
    if not observation.lines:
        raise NoSignal("the lines that steps spend their time in were not seen")
    for line in observation.lines:
        if line.words.rpartition(".")[2] != "deepcopy" or not is_worth(observation, line.ms):
            continue
        yield Finding(
            kind="slow",
            what=f"copy.deepcopy takes {ms(line.ms)} of a step: it makes each module, name and "
            "tensor of what it copies again",
            do="copy once, and from then on write the new numbers into that copy: "
            "kept.lerp_(new, share) or kept.copy_(new), for all tensors at once "
            "torch._foreach_lerp_ or torch._foreach_copy_",
            where=str(line.site),
            cost_ms=line.ms,
            parity="bit-identical",
        )
