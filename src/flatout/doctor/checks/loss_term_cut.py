"""Check for loss terms that are new tensors, so that no parameter learns from them."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, in_losses
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_LEAST = 3
"""Minimum number of losses with new tensors: in fewer losses such tensors may be term weights."""


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report loss terms whose graph ends in a tensor that was made in the same step."""
    for term in in_losses(observation, "cut"):
        if term.count < _LEAST:
            continue
        yield Finding(
            kind="danger",
            what=f"a term of the loss is made of a new tensor {term.detail['shape']} in each "
            "step, with requires_grad=True: the tensor has no graph, so that no parameter "
            f"learns from this term; found in {term.count} steps",
            do="compute it from the model's outputs, as by torch.stack, without item(), numpy() "
            "or torch.tensor()",
            where=at(term.site),
            parity="changes learning",
        )
