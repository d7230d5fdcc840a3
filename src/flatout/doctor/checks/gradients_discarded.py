"""Check for gradients that are zeroed before a step has used them."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report steps over several batches, each of which zeroes the previous batch's gradients."""
    if not observation.optimizers:
        raise NoSignal("no optimizer was observed")
    for optimizer in observation.optimizers:
        if optimizer.discarded is None:
            continue
        lost, of = optimizer.discarded
        yield Finding(
            kind="danger",
            what=f"the gradients of {lost} of {of} batches that were checked are zeroed here "
            "before a step has used them: the step uses the last batch only",
            do="zero_grad() right after step(), under the same condition",
            where=at(optimizer.discarded_site),
            parity="changes learning",
        )
