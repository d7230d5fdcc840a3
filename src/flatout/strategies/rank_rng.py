"""Random draws that differ between ranks, in a step on several ranks.

All ranks begin with the same seeds, so that they begin with the same model. But then they would put
the same dropout mask on each part of the batch. So in a step, a rank draws from seeds that are made
of the common seeds and its rank number. The state that is compared, saved and resumed stays the
same on all ranks. torch's generator advances by one draw a step, from which all ranks' own seeds
follow, and the states of Keras' seed generators advance as in Keras. So a DataLoader that shuffles
by torch's generator also shuffles equally on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flatout.models import keras_seeds_moved
from flatout.world import World

# 2^32 divided by the golden ratio: the consecutive seeds of two ranks do not meet.
_APART = 0x9E3779B1


@contextmanager
def rank_rng(world: World) -> Iterator[None]:
    """Let this thread draw this rank's own numbers, from torch and Keras, in the block.

    Draws of Keras with an integer as seed are the same on all ranks, as the user asked.
    """
    common = int(torch.randint(2**62, (), dtype=torch.int64))
    after = torch.get_rng_state()
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    after_cuda = torch.cuda.get_rng_state() if uses_cuda else None
    own = common ^ world.rank * _APART
    torch.default_generator.manual_seed(own)
    if uses_cuda:
        torch.cuda.manual_seed(own)
    try:
        with keras_seeds_moved(world.rank * _APART):
            yield
    finally:
        torch.set_rng_state(after)
        if after_cuda is not None:
            torch.cuda.set_rng_state(after_cuda)
