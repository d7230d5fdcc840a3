from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from flatout.data.randomness import random_state, seeded, set_random_state


def _draw():
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(3).tolist()


def test_a_state_brings_the_same_draws_back():
    random.gauss(0, 1)  # leaves a second value waiting
    state = random_state()
    first = _draw()
    assert _draw() != first
    set_random_state(state)
    assert _draw() == first


def test_a_state_survives_json():
    state = random_state()
    first = _draw()
    state["python"] = json.loads(json.dumps(state["python"]))
    set_random_state(state)
    assert _draw() == first


def test_seeding_ends_with_the_block():
    state = random_state()
    undisturbed = _draw()
    set_random_state(state)
    with seeded(2**63 + 5):
        inside = _draw()
    assert _draw() == undisturbed
    with seeded(2**63 + 5):
        assert _draw() == inside


def test_an_error_ends_the_block_too():
    state = random_state()
    undisturbed = _draw()
    set_random_state(state)
    with pytest.raises(ZeroDivisionError), seeded(1):
        1 / 0  # noqa: B018
    assert _draw() == undisturbed


@pytest.mark.gpu
def test_seeding_leaves_the_gpu_alone():
    torch.cuda.manual_seed(4)
    before = torch.cuda.get_rng_state()
    with seeded(1):
        pass
    assert torch.equal(torch.cuda.get_rng_state(), before)
