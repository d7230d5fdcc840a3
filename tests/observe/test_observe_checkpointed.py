"""Parts of forward that backward computes again: how often, and what forward would keep of them."""

from threading import get_ident

import pytest
import torch
from torch.utils import checkpoint as module

from flatout.observe.checkpointed import Checkpointed
from flatout.observe.watch import Watch

NUMBERS = 1 << 16


def step(watch, x, weight, *, reentrant):
    def part(rows):
        return (rows * weight).exp().exp()  # which keeps rows and both results, and weight anyway

    module.checkpoint(part, x, use_reentrant=reentrant).sum().backward()
    watch.lanes.steps += 1
    if watch.lanes.steps >= watch.lanes.due:
        watch.attend()


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_backward_needs_of_them_is_counted_and_the_hooks_go(reentrant):
    plain = [vars(module.CheckpointFunction)["forward"], vars(module._checkpoint_hook)["__init__"]]
    watch = Watch()
    watch.lanes.thread = get_ident()
    checkpointed = Checkpointed(torch, watch)
    x = torch.zeros(NUMBERS, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(()))
    for _ in range(24):
        step(watch, x, weight, reentrant=reentrant)
    assert checkpointed.mb == 3 * NUMBERS * 4 / 2**20
    torch.testing.assert_close(x.grad, torch.full_like(x, 24 * torch.e))
    (call,) = [call for call in watch.calls.all() if call.kind == "checkpoint"]
    assert (call.count, call.site.file) == (23, __file__)  # the first step is no part of it
    assert call.seconds > 0
    assert plain == [
        vars(module.CheckpointFunction)["forward"], vars(module._checkpoint_hook)["__init__"]
    ]  # fmt: skip
    assert "__exit__" not in vars(module._checkpoint_hook)


def test_without_gradients_nothing_is_computed_again():
    watch = Watch()
    watch.lanes.thread = get_ident()
    checkpointed = Checkpointed(torch, watch)
    with torch.no_grad():
        module.checkpoint(torch.exp, torch.zeros(3), use_reentrant=False)
    assert (checkpointed.mb, watch.calls.all()) == (None, [])
    checkpointed._end()
