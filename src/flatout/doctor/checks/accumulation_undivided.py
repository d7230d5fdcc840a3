"""Gradients of several batches are added up, each of a mean, and not divided by their number."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, in_losses
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_SCALED = ("SGD", "ASGD", "LBFGS")
"""Optimizers whose step grows with the gradient; that of Adam and its kin does not."""


@check()
def look(observation: Observation) -> Findings:
    """Whether losses that are means were added up over batches of the loader."""
    for loss in in_losses(observation, "undivided"):
        many = loss.detail["backwards"]
        optimizer = next(iter(observation.optimizers), None)
        is_scaled = optimizer is not None and optimizer.kind.rpartition(".")[2] in _SCALED
        yield Finding(
            kind="danger" if is_scaled else "note",
            what=f"{many} backward passes of mean losses go into a step, and none is divided: the "
            f"gradient is {many} times that of their mean"
            + ("" if is_scaled else ", which changes clipping and decay alone here"),
            do=f"(loss / {many}).backward(), so that the rate means the same as without "
            "accumulation",
            where=at(None if optimizer is None else optimizer.backward_site or optimizer.site),
            parity="changes learning",
        )
