"""Check for NaN and infinity that are silently replaced, or whose steps are silently skipped."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, in_losses
from flatout.doctor.finding import Finding
from flatout.observe import InLoss, Observation

_FEW, _RARE = 2, 0.01
"""Maximum number (_FEW) and share (_RARE) of skipped steps for a guard against rare batches."""

_DO = (
    "look where they come from: a logarithm or root of zero, a division by it, a batch with NaN; "
    "clamp there"
)


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report NaN and infinity that nan_to_num replaced, and losses whose steps were skipped."""
    for loss in in_losses(observation, "nan"):
        hidden, of = loss.detail["hidden"], loss.detail["of"]
        yield _finding(
            loss,
            f"nan_to_num hides {hidden:,} of {of:,} numbers that are NaN or infinite, in "
            f"{loss.count} of {observation.loss_looks} backward passes that were checked",
        )
    for loss in in_losses(observation, "skipped"):
        of = loss.detail["of"]
        if loss.count >= max(_FEW, _RARE * of):
            yield _finding(
                loss,
                f"{loss.count:,} of {of:,} losses are NaN or infinite, and their steps are left "
                "out: these samples are never learned",
            )


def _finding(loss: InLoss, what: str) -> Finding:
    return Finding(kind="danger", what=what, do=_DO, where=at(loss.site), parity="changes learning")
