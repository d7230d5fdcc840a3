"""Collectives that a script calls itself."""

from threading import get_ident

import pytest
import torch
import torch.distributed as dist

from flatout.observe.collectives import watch_collectives
from flatout.observe.lanes import BACKWARD, FORWARD, SYNC
from flatout.observe.watch import Watch


@pytest.fixture
def watch(tmp_path):
    """A Watch that is hooked in, in a group of this process alone."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    watch = Watch()
    watch.lanes.thread = get_ident()
    watch_collectives(torch, watch)
    yield watch
    watch.quick.end()
    dist.destroy_process_group()


def test_each_is_noted_with_its_bytes_and_its_time_is_the_lane_of_sync(watch):
    watch.lanes.switch(FORWARD)
    for size in (100, 300):
        dist.all_reduce(torch.ones(size))
    dist.barrier()
    found = {call.detail["name"]: call for call in watch.calls.all()}
    assert (found["all_reduce"].count, found["all_reduce"].detail["bytes"]) == (2, 800)
    assert found["barrier"].count == 1
    assert found["all_reduce"].site.file == __file__
    assert watch.lanes.spent[SYNC] > 0
    assert watch.lanes.current == FORWARD


def test_those_of_a_wrapper_during_backward_are_none_of_the_scripts(watch):
    watch.lanes.switch(BACKWARD)
    dist.all_reduce(torch.ones(2))
    assert watch.calls.all() == []


def test_they_are_as_torch_made_them_before_anything_is_traced(watch):
    plain = dist.all_reduce.__wrapped__
    watch.quick.end()
    assert dist.all_reduce is plain
