"""Check for NaN or infinity in weights or buffers, even if the loss is finite."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, few, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Report weights and buffers that are not finite."""
    for model in models(observation):
        if model.not_finite:
            yield Finding(
                kind="danger",
                what=f"NaN or infinity in {len(model.not_finite)} of the model's weights and "
                f"buffers: {few(model.not_finite)}",
                do="look for a batch that is empty, has NaN in it, or a single sample under "
                "BatchNorm; what is evaluated or saved after it is worthless",
                where=at(model.site),
                parity="changes learning",
            )
