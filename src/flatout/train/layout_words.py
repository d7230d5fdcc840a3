"""Description of the division of a fit's work among ranks."""

from __future__ import annotations

import torch

from flatout.train.loop_state import LoopState
from flatout.words import counted
from flatout.world import servers


def layout_words(loop: LoopState, batch_size: int | None) -> str:
    """Return a line such as "2 ranks x 1 CPU, ddp, global batch 64 = 2 x 32"."""
    ranks, device = loop.world.size, loop.device
    each = f" x {torch.get_num_threads()} CPU" if device.type == "cpu" else " of a GPU each"
    assert loop.resolved is not None
    asked = loop.resolved.world
    words = f"{ranks} ranks{each}, {loop.stepper.strategy.layout or asked.strategy}"
    if asked.strategy == "local_sgd":
        words += f" with an average every {asked.sync_every} steps"
    if asked.strategy == "parameter_server":
        there, count, where = servers.apart(), asked.servers, ""
        if there is not None:
            count = there.size
            where = " on the nodes of the ranks" if there.are_here else " on nodes of their own"
        words += f" (servers: {count}{where}, staleness: {asked.staleness})"
        if asked.spare_workers:
            words += f", waiting for {counted(ranks - asked.spare_workers, 'rank')} in each step"
    if batch_size is not None and loop.takes_whole_batches:
        words += f", global batch {batch_size:,}"
    elif batch_size is not None:
        part = f"{batch_size // ranks:,}"
        if batch_size % ranks:
            part = f"{batch_size / ranks:,.1f}"
        words += f", global batch {batch_size:,} = {ranks} x {part}"
    return words
