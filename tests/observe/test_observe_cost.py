"""What observing costs is counted wherever the script stands."""

from inspect import signature
from itertools import product

import pytest
import torch

from flatout.observe import cost
from flatout.observe.watch import Watch


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_is_counted_in_an_evaluation_too(mode, monkeypatch):
    monkeypatch.setattr(cost, "_QUADRUPLES", 3)
    timed = cost._extra_ns
    # Of three times the median may be none: the clock is not what is tested.
    monkeypatch.setattr(cost, "_extra_ns", lambda *calls: timed(*calls) + 1)
    cost._once.cache_clear()
    watch = Watch()
    watch.lanes.steps = 10
    watch.calls.noted = 10
    with mode():
        assert cost.added_us_per_step(watch, 0.0) > 0
    cost._once.cache_clear()


@pytest.mark.parametrize(
    "name", [name for name in vars(cost) if name[0] == "_" and name.endswith("_ns")]
)
def test_each_hook_can_be_timed(name, monkeypatch):
    monkeypatch.setattr(cost, "_QUADRUPLES", 20)
    if name != "_extra_ns":
        state = torch.get_rng_state()
        hook = getattr(cost, name)
        for kind in product([False, True], repeat=len(signature(hook).parameters)):
            assert 0 <= hook(*kind) < 1e8
        assert torch.equal(torch.get_rng_state(), state)  # it is the script's
