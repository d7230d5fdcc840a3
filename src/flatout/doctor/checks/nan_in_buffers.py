"""NaN or infinity in weights or buffers, whatever the loss says."""

from __future__ import annotations

from flatout.doctor.checks.check import Check
from flatout.doctor.checks.signals import at, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_NAMED = 3


def look(seen: Observation) -> list[Finding]:
    """Which of them are not finite."""
    return [
        Finding(
            name="nan_in_buffers",
            kind="danger",
            what=f"NaN or infinity in {len(model.not_finite)} of the model's weights and buffers: "
            + ", ".join(model.not_finite[:_NAMED])
            + (", ..." if len(model.not_finite) > _NAMED else ""),
            do="look for a batch that is empty, has NaN in it, or a single sample under BatchNorm; "
            "what is evaluated or saved after it is worthless",
            number=51,
            where=at(model.site),
            parity="changes learning",
        )
        for model in models(seen)
        if model.not_finite
    ]


CHECK = Check("nan_in_buffers", (51,), look)
