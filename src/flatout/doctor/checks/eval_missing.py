"""eval() is missing before a validation."""

from __future__ import annotations

from flatout.doctor.checks.check import Check
from flatout.doctor.checks.signals import layers_of_two_modes, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


def look(seen: Observation) -> list[Finding]:
    """Where a model is evaluated in train mode, though that changes what it computes."""
    return [
        Finding(
            name="eval_missing",
            kind="danger",
            what=f"validates without eval(): {layers_of_two_modes(model)} as in training",
            do="model.eval() before the evaluation, model.train() after it",
            number=50,
            where=str(model.evaluated_in_train_mode),
            parity="changes learning",
        )
        for model in models(seen)
        if model.evaluated_in_train_mode
    ]


CHECK = Check("eval_missing", (50,), look)
