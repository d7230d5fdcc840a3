"""Hooks that are on a module for a few steps do not hinder its copies."""

import copy
import io
import threading

import torch
from torch import nn

from flatout.hooks import PassingHook


class Looker:
    """As what looks at a script: no copy can be made of it."""

    def __init__(self):
        self.lock, self.calls = threading.Lock(), 0

    def look(self, module, args):
        self.calls += 1


def test_a_module_is_copied_and_saved_without_them():
    looker, model = Looker(), nn.Linear(2, 2)
    handle = model.register_forward_pre_hook(PassingHook(looker.look))
    x = torch.ones(1, 2)
    model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for made in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(made(x), model.weight.sum(1)[None] + model.bias)
    assert looker.calls == 1
    handle.remove()
