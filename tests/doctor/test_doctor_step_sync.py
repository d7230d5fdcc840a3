"""What a trial asks at its first step: how many batches may wait in a loader's queue."""

import gc
import weakref

import pytest
from torch.utils.data import DataLoader

from flatout.doctor.trials.step_sync import _queued_batches


class Held:
    """As what torch.compile keeps by a proxy."""


@pytest.mark.slow
def test_batches_that_wait_are_those_of_workers_and_no_proxy_is_asked():
    gc.collect()  # loaders of earlier tests
    held = Held()
    gone = weakref.proxy(held)
    del held
    assert type(gone) is weakref.ProxyType  # what it stood for is no more
    assert _queued_batches() == 0
    batches = iter(DataLoader(range(64), num_workers=2, prefetch_factor=3))
    assert next(batches) == 0
    assert _queued_batches() == 6
