"""Check for frozen leading layers, which compute the same in each epoch."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, is_worth, lane, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report frozen leading layers, or frozen modules before the model, that take much time."""
    for backbone in observation.backbones:
        if is_worth(observation, backbone.ms):
            name = backbone.kind.rpartition(".")[2]
            yield Finding(
                kind="slow",
                what=f"{name}, which nothing trains, is called by itself in each step: it gives "
                "the same for the same sample in each epoch",
                do="compute its outputs once and train on them; not where samples are augmented "
                "at random",
                where=at(backbone.site),
                cost_ms=backbone.ms,
                parity="rounding",
                recipe={"script.features": "memory"},
            )
    trained = models(observation)
    if all(model.frozen_share is None for model in trained):
        if observation.backbones:
            return
        raise NoSignal("the time of frozen layers was not observed")
    forward = lane(observation, "forward")
    for model in trained:
        if model.frozen_share and is_worth(observation, model.frozen_share * forward):
            yield Finding(
                kind="slow",
                what=f"{model.frozen_share:.0%} of forward is in leading layers that are not "
                "trained: they give the same for the same sample in each epoch",
                do="compute their outputs once and train on them; not where samples are augmented "
                "at random or dropout is active before their end",
                where=at(model.site),
                cost_ms=model.frozen_share * forward,
                parity="rounding",
                recipe={"script.features": "memory"},
            )
