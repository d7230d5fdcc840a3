"""Check for losses that count padding as targets."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, in_losses
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_MUCH = 0.1
"""Smallest share of padding among the targets that is reported."""


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report targets of cross_entropy that have one value at the ends of their rows."""
    for loss in in_losses(observation, "padding"):
        value, share = loss.detail["value"], loss.detail["padded"] / max(1, loss.detail["of"])
        if share < _MUCH:
            continue
        # If rows have no end token, the model uses padding to mark the end.
        yield Finding(
            kind="danger" if loss.detail["is_ended"] else "note",
            what=f"{share:.0%} of the loss's targets are padding, {value}: padding is easy to "
            "predict, so the loss falls with it, and the other targets weigh that much less",
            do=f"ignore_index={value} in the loss",
            where=at(loss.site),
            parity="changes learning",
        )
