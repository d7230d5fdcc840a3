"""Check for batches that are copied to the GPU from memory that is not pinned."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import (
    at,
    is_gpu,
    is_worth,
    lane,
    made,
    ms,
    returned_ms,
    training_loaders,
)
from flatout.doctor.edits import arguments
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(edit=arguments.pin)
def look(observation: Observation) -> Findings:
    """Report loaders that do not pin, if copies to a GPU take time because of that."""
    if not is_gpu(observation):
        return
    loaders = training_loaders(observation)
    if all(loader.pin_memory is None for loader in loaders):
        raise NoSignal("whether the loader pins its memory was not observed")
    copy = lane(observation, "copy")
    # At the copy, the host also waits for all work that is queued on the GPU.
    if observation.device_time is not None:
        hidden = returned_ms(observation, copy) or 0.0
        copy = min(copy, max(hidden, observation.device_time.to_device_ms))
    if not is_worth(observation, copy):
        return
    for loader in loaders:
        if loader.pin_memory is False:
            yield Finding(
                kind="slow",
                what=f"the copy to the GPU takes {ms(copy)} per step, from memory that is not "
                "pinned",
                do='DataLoader(..., pin_memory=True) and batch.to("cuda", non_blocking=True)',
                where=at(made(loader)),
                cost_ms=copy,
                parity="bit-identical",
                recipe={"input.pin_memory": "on"},
            )
