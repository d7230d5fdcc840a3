"""Everything that a training step changes, taken and put back bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flatout.data import randomness


def random_state() -> dict[str, Any]:
    """The states of all random generators that a step may draw from, devices included."""
    state = randomness.random_state()
    # Asking whether CUDA is available may create a context; a job that uses it has one.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` gave."""
    randomness.set_random_state(state)
    if "cuda" in state and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """For a trial forward: afterwards buffers and random states are as before."""
    before = random_state()
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        set_random_state(before)
        for buffer, value in buffers:
            # .data: no graph of the caller may notice that the value came and went.
            buffer.data.copy_(value)


class Snapshot:
    """Weights, buffers, gradients, modes, optimiser state and random states at one moment.

    Args:
        model: its parameters and buffers are cloned on their device.
        optimizer: its state dict is copied.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._values = {n: t.detach().clone() for n, t in _tensors(model)}
        self._gradients = {
            n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
        }
        self._modes = [(m, m.training) for m in model.modules()]
        self._state = copy.deepcopy(optimizer.state_dict())
        self._random = random_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Bring everything back; parameters keep their identity and their present strides."""
        for name, tensor in _tensors(self._model):
            # .data: no graph of the caller may notice that the value came and went.
            tensor.data.copy_(self._values[name])
        for name, parameter in self._model.named_parameters():
            parameter.grad = self._gradients[name]
        for module, training in self._modes:
            module.training = training
        # Copied again, because the optimiser goes on to write into what it is given.
        self._optimizer.load_state_dict(copy.deepcopy(self._state))
        set_random_state(self._random)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
