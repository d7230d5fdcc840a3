"""Hooks on a module for a few steps, without a trace in the module."""

import copy
import gc
import io

import pytest
import torch
from torch import nn

from flatout.hooks import after_forward, before_forward, unnumbered


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x, *, scale=1.0):
        return self.inner(x) * scale


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def test_a_hooked_module_is_copied_saved_and_listed_as_without_hooks():
    model, calls, x = Model(), [], torch.ones(1, 2)
    before, listed = saved(model), str(vars(model.inner))
    handles = [
        before_forward(model, lambda *given: calls.append(given), with_kwargs=True),
        after_forward(model, lambda *given: calls.append(given)),
        after_forward(model.inner, lambda *given: calls.append(given)),
    ]
    assert saved(model) == saved(copy.deepcopy(model)) == before
    assert str(vars(model.inner)) == listed
    y = model(x, scale=2.0)
    assert [given[0] for given in calls] == [model, model.inner, model]
    assert calls[0][1:] == ((x,), {"scale": 2.0})
    assert calls[2][1:] == ((x,), y)
    copy.deepcopy(model)(x)
    assert len(calls) == 3
    for handle in handles:
        handle.remove()
        handle.remove()
    model(x)
    assert len(calls) == 3


@pytest.mark.slow
def test_module_calls_are_torchs_own_again_after_the_last_hook():
    gc.collect()
    before_forward(Model(), print).remove()  # owners of hooks that other tests let go are forgotten
    plain, model = nn.Module._call_impl, Model()
    handles = [before_forward(part, print) for part in (model, model.inner)]
    handles[0].remove()
    assert nn.Module._call_impl is not plain
    handles[1].remove()
    assert nn.Module._call_impl is plain


def test_unnumbered_hooks_take_no_number_of_the_script():
    tensor, own = torch.ones(2, requires_grad=True), []
    first = tensor.register_hook(lambda gradient: own.append("first"))
    ours = unnumbered(tensor.register_hook(lambda gradient: own.append("ours")))
    second = tensor.register_hook(lambda gradient: own.append("second"))
    assert second.id == first.id + 1
    tensor.sum().backward()
    assert own == ["first", "ours", "second"]
    ours.remove()
    tensor.sum().backward()
    assert own[3:] == ["first", "second"]
