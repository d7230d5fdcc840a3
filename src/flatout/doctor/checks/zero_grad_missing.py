"""Check for gradients that are never zeroed, so that they accumulate over all steps."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Report optimizers whose gradients were still present at each next backward."""
    known = [
        optimizer for optimizer in observation.optimizers if optimizer.kept_gradients is not None
    ]
    if not known:
        raise NoSignal("no two steps of an optimizer with gradients were observed")
    for optimizer in known:
        kept, of = optimizer.kept_gradients or (0, 0)
        if of < 2 or kept < of:
            continue
        yield Finding(
            kind="danger",
            what=f"in {kept} of {of} steps the gradients of the step before were still there when "
            "backward began, and it has added to them: the optimizer steps along the sum of all "
            "so far",
            do="optimizer.zero_grad() before each backward, or before the first of those that "
            "belong to one step",
            where=at(optimizer.backward_site or optimizer.site),
            parity="changes learning",
        )
