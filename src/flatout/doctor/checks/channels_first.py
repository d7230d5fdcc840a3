"""Check for convolutions on images whose channels are not adjacent in memory."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, compute_ms, is_worth, models, ms
from flatout.doctor.edits.models import channels_last
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation


@check(edit=channels_last)
def look(observation: Observation) -> Findings:
    """Report models with two-dimensional convolutions that are not in channels_last."""
    convolutional = [model for model in models(observation) if _convolves_images(model)]
    if not convolutional:
        return
    cost = compute_ms(observation, "forward", "backward")
    if not is_worth(observation, cost):
        return
    for model in convolutional:
        if not model.is_channels_last:
            yield Finding(
                kind="slow",
                what=f"{model.kind.rpartition('.')[2]} has convolutions and is not in "
                f"channels_last; forward and backward take {ms(cost)}",
                do="model.to(memory_format=torch.channels_last), and the batches too; pays most "
                "together with bf16",
                where=at(model.site),
                cost_ms=cost,
                parity="redrawn"
                if any("Dropout" in layer for layer in model.layers)
                else "rounding",
                recipe={"compute.memory_format": "channels_last"},
            )


def _convolves_images(model: Model) -> bool:
    named = any("Conv" in layer for layer in model.layers)
    return model.has_convolutions and (
        not named or any("Conv2" in layer or "Conv3" in layer for layer in model.layers)
    )
