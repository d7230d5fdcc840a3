"""Check for validation without eval()."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import layers_of_two_modes, models
from flatout.doctor.edits import evaluation
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation


def _draws_only(observation: Observation, model: Model) -> bool:
    is_one_of_several = len(observation.models) > 1 and len(observation.optimizers) > 1
    has_dropout = any("Drop" in layer for layer in model.layers)
    # A model called on the same whole input each time, such as fixed noise, is not on a data set.
    held_out = [item for item in observation.inputs if not item.in_training]
    is_on_data = any((item.length or 0) > (item.batch_size or 0) for item in held_out)
    return is_one_of_several and not has_dropout and not is_on_data


@check(edit=evaluation.eval_first, hooks=True)
def look(observation: Observation) -> Findings:
    """Report models that are evaluated in train mode, if that changes their results.

    Also reported are functional dropouts that do not follow the mode.
    """
    for model in models(observation):
        if model.evaluated_in_train_mode:
            draws = _draws_only(observation, model)
            verb = "draws samples" if draws else "validates"
            how, do = "without eval()", "model.eval() before the evaluation, model.train() after it"
            if model.is_told:
                how, do = "with training=True", "model(x, training=False) where it is evaluated"
            yield Finding(
                kind="note" if draws else "danger",
                what=f"{verb} {how}: {layers_of_two_modes(model)} as in training",
                do=do,
                where=str(model.evaluated_in_train_mode),
                parity="changes learning",
            )
    for site in observation.dropouts:
        yield Finding(
            kind="danger" if observation.evaluation_site else "note",
            what="this dropout does not get the model's mode: it still drops values after eval()",
            do="training=self.training in its call, or an nn.Dropout",
            where=str(site),
            parity="changes learning",
        )
