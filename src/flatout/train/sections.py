"""Sections of an epoch, in which ranks claim parts of batches while they train.

If ranks step alone, a slow rank need not delay the other ranks: when a rank is ready, it claims the
next part of a batch, and no other rank computes this part. All ranks wait for one another at the
end of a section. A section ends with the epoch, where a checkpoint is due, or when a rank asks for
it.
"""

from __future__ import annotations

import torch

from flatout.data import Claims, Source
from flatout.models import adapter_of
from flatout.train.loop import Loop


def open_section(loop: Loop, source: Source, every: int | None) -> bool:
    """Let ranks claim parts of the epoch's next batches; all ranks call it."""
    if not loop.stepper.strategy.parts or source.steps is None:
        return False
    if loop.is_tuning() or adapter_of(loop.model).meets_in_loss:
        return False
    if loop.tuner is not None:
        loop.tuner.rest()  # the tuner's later checks need all ranks at the same step
    steps = -(-(source.steps - loop.progress.batch_in_epoch) // loop.asked.accumulate)
    if every:
        steps = min(steps, every - loop.step_count % every)
    strategy = loop.stepper.strategy
    strategy.open_section(steps)
    loop.feed.claims = Claims(
        strategy.claim,
        strategy.used,
        strategy.parts,
        loop.progress.batch_in_epoch,
        source.steps,
        loop.asked.accumulate,
    )
    return True


def end_section(loop: Loop) -> None:
    """End a section: synchronize all ranks, and count the steps of all ranks."""
    claims = loop.feed.claims
    assert claims is not None
    assert claims.end is not None
    loop.meet_others()
    loop.feed.taken = claims.end
    loop.count_step()
    loop.feed.claims = None
    # Each step has drawn from torch's generator, which must be the same on all ranks.
    made = loop.world.gather(claims.used, "parts that each rank has taken")
    state = loop.world.from_rank(torch.get_rng_state(), made.index(max(made)), "random state")
    torch.set_rng_state(state)
