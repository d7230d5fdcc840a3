"""Check for a missing train() after a validation, or before the first epoch."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import layers_of_two_modes, models
from flatout.doctor.edits import loops
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(edit=loops.train_again)
def look(observation: Observation) -> Findings:
    """Report models that are trained in eval mode, if that changes their results."""
    for model in models(observation):
        if model.trained_in_eval_mode:
            how, do = "in eval mode", "model.train() at the start of each epoch"
            if model.is_told:
                how = "without training=True"
                do = "model(x, training=True); a class of your own: call(self, x, training=None)"
            yield Finding(
                kind="danger",
                what=f"trains {how}: {layers_of_two_modes(model)} as in evaluation",
                do=do,
                where=str(model.trained_in_eval_mode),
                parity="changes learning",
            )
