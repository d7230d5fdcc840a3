"""Check for a usable GPU that the job does not use."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, is_gpu, step_ms
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Report a model that trains on the CPU of a machine with a GPU that torch could use."""
    if observation.gpus is None:
        raise NoSignal("the GPUs of the machine were not observed")
    step_ms(observation)
    if is_gpu(observation) or not observation.gpus:
        return
    yield Finding(
        kind="slow",
        what=f"the model computes on {observation.device}, while {observation.gpus[0]} does "
        "nothing for it",
        do='model.to("cuda"), and each batch too',
        where=at(observation.models[0].site) if observation.models else "",
        parity="redrawn",
        recipe={"world.device": "cuda"},
    )
