"""NaN and infinity are replaced on the way to the loss, and no one is told."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, in_losses
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """How many of the numbers that nan_to_num got were none."""
    for loss in in_losses(observation, "nan"):
        hidden, of = loss.detail["hidden"], loss.detail["of"]
        yield Finding(
            kind="danger",
            what=f"nan_to_num hides {hidden:,} of {of:,} numbers that are NaN or infinite, in "
            f"{loss.count} of {observation.loss_looks} backward passes that were looked at",
            do="look where they come from: a logarithm or root of zero, a division by it, a batch "
            "with NaN; clamp there",
            where=at(loss.site),
            parity="changes learning",
        )
