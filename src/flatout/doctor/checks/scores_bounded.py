"""Check for losses whose scores an activation has bounded, such as ReLU before cross_entropy."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, in_losses
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_WHY = {
    ("cross_entropy", "ReLU"): "no score is below 0, and a class whose score is 0 gets no gradient",
    ("cross_entropy", "tanh"): "scores lie between -1 and 1: of two classes the likelier one never "
    "gets more than 88%, of ten 45%",
    ("binary_cross_entropy_with_logits", "ReLU"): "no score is below 0, so that no probability is "
    "below 50%, and a score of 0 gets no gradient",
    ("binary_cross_entropy_with_logits", "tanh"): "scores lie between -1 and 1, so that "
    "probabilities lie between 27% and 73%",
}


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report bounding activations right before a loss that needs unbounded scores."""
    for loss in in_losses(observation, "bounded"):
        outer, by = loss.detail["outer"], loss.detail["by"]
        yield Finding(
            kind="danger",
            what=f"{outer} is given {by}'s result; {_WHY[outer, by]}",
            do=f"give {outer} the result of the last layer, without {by}",
            where=at(loss.site),
            parity="changes learning",
        )
