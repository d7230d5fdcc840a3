"""Check for softmax or cross_entropy of a single score."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, in_losses
from flatout.doctor.finding import Finding
from flatout.observe import Observation

# Share of losses from which on the model has one output. Bags of one item occur in few losses.
_SHARE = 0.9


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report softmax over a dimension of size 1 after the last layer, in nearly all losses."""
    for loss in in_losses(observation, "single"):
        if loss.count < _SHARE * observation.loss_looks:
            continue
        shape = ", ".join(map(str, loss.detail["shape"]))
        always = "0" if loss.detail["outer"] == "log_softmax" else "1"
        yield Finding(
            kind="danger",
            what=f"{loss.detail['outer']} of [{shape}] is taken over the dimension of 1: it gives "
            f"{always} whatever the model says, and no gradient comes through it",
            do="one score: binary_cross_entropy_with_logits; else an output for each class",
            where=at(loss.site),
            parity="changes learning",
        )
