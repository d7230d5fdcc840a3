"""Check for losses whose input has been through an activation that the loss applies itself."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, in_losses
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_WHY = {
    ("cross_entropy", "softmax"): "that takes the softmax of probabilities: between two classes the"
    " loss never falls below 0.31, and gradients are a fraction of what they should be",
    ("cross_entropy", "sigmoid"): "that takes the softmax of numbers between 0 and 1: between two "
    "classes the loss never falls below 0.31",
    ("nll_loss", "softmax"): "that expects log-probabilities: without the logarithm right answers "
    "give hardly any gradient",
    ("nll_loss", "sigmoid"): "that expects log-probabilities",
    ("nll_loss", "a layer"): "that expects log-probabilities: of plain scores it has no lower "
    "bound, and they grow without end",
    ("kl_div", "softmax"): "that expects log-probabilities: the loss is least where all goes to "
    "the likeliest class of the target",
    ("kl_div", "a layer"): "that expects log-probabilities: of plain scores it has no lower "
    "bound, and they grow without end",
}


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report activations right before a loss that applies its own."""
    for loss in in_losses(observation, "twice"):
        outer, inner = loss.detail["outer"], loss.detail["inner"]
        is_same = outer in ("cross_entropy", "log_softmax") and inner == "log_softmax"
        why = "which gives the same again" if is_same else _WHY.get((outer, inner))
        gets = "the scores of a layer as they are" if inner == "a layer" else f"{inner}'s result"
        yield Finding(
            kind="note" if is_same else "danger",
            what=f"{outer} is given {gets}; {why or f'{outer} takes it once more'}",
            do="nll_loss takes log-probabilities" if is_same else _cure(observation, outer, inner),
            where=at(loss.site),
            parity="bit-identical" if is_same else "changes learning",
        )


def _cure(observation: Observation, outer: str, inner: str) -> str:
    if observation.framework == "keras":
        return f"a last layer without {inner}; or from_logits=False in the loss"
    if outer == "kl_div":
        return "log_softmax of the scores as its first argument"
    if outer == "nll_loss":
        return "cross_entropy on the scores, without an activation"
    return f"give {outer} the scores without {inner}; take {inner} where you read probabilities"
