"""Random draws of a rank's own, in a step on several ranks.

All ranks begin with the same seeds, so that they begin with the same model. Left alone they would
then put the same dropout mask on each part of the batch. Within a step a rank draws from seeds that
are made of the common ones and its number. What is compared, saved and resumed stays the same on
all ranks: torch's generator goes on by one draw a step, from which all ranks' own follow, and the
states of Keras' seed generators go on as in Keras. So a DataLoader that shuffles by torch's
generator also shuffles alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flatout.models import keras_seeds_moved
from flatout.world import World

# 2^32 divided by the golden ratio: seeds of two ranks do not meet by counting up.
_APART = 0x9E3779B1


@contextmanager
def rank_rng(world: World) -> Iterator[None]:
    """Within, this thread draws this rank's own numbers, from torch and through Keras.

    What Keras draws by a whole number as its seed is the same on all ranks, as the user says.
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
