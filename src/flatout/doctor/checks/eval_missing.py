"""eval() is missing before a validation."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import layers_of_two_modes, models
from flatout.doctor.edits import evaluation
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(edit=evaluation.eval_first)
def look(observation: Observation) -> Findings:
    """Where a model is evaluated in train mode, though that changes what it computes."""
    for model in models(observation):
        if model.evaluated_in_train_mode:
            yield Finding(
                kind="danger",
                what=f"validates without eval(): {layers_of_two_modes(model)} as in training",
                do="model.eval() before the evaluation, model.train() after it",
                where=str(model.evaluated_in_train_mode),
                parity="changes learning",
            )
