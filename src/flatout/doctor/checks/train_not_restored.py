"""train() is missing after a validation, or before the first epoch."""

from __future__ import annotations

from flatout.doctor.checks.check import Check
from flatout.doctor.checks.signals import layers_of_two_modes, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


def look(seen: Observation) -> list[Finding]:
    """Where a model is trained in eval mode, though that changes what it computes."""
    return [
        Finding(
            name="train_not_restored",
            kind="danger",
            what=f"trains in eval mode: {layers_of_two_modes(model)} as in evaluation",
            do="model.train() at the start of each epoch",
            number=50,
            where=str(model.trained_in_eval_mode),
            parity="changes learning",
        )
        for model in models(seen)
        if model.trained_in_eval_mode
    ]


CHECK = Check("train_not_restored", (50,), look)
