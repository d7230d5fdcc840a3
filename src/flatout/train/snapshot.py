"""Saves and restores bit for bit everything that a training step changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flatout.data import randomness
from flatout.models import adapter_of
from flatout.optim import Optimizers, align_state, as_tuple
from flatout.train.held_state import HeldState, has_few_bytes


def random_state() -> dict[str, Any]:
    """Return the states of all random generators that a step may use, devices included."""
    state = randomness.random_state()
    # A check whether CUDA is available may create a CUDA context; a job that uses CUDA has a
    # context already.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states from `random_state`."""
    randomness.set_random_state(state)
    if "cuda" in state and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # If the number of GPUs has changed, restore those that exist in both cases.
        for device, item in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(item, device)


@contextmanager
def untouched(
    model: nn.Module, compute: Any = None, *, only_on_error: bool = False
) -> Iterator[HeldState]:
    """Restore buffers, modes and random states after a trial forward in this context."""
    before = random_state()
    held = _held(model, compute)
    try:
        yield held
    except BaseException:
        only_on_error = False
        raise
    finally:
        if not only_on_error:
            set_random_state(before)
            held.restore()


class Moving:
    """Restores buffers that a model's forward has changed in place, after the forward has failed.

    At first all buffers are saved. Later only small buffers and those whose version counter has
    changed are saved: most large buffers never change. BatchNorm changes its small buffers without
    a new version.
    """

    def __init__(
        self, model: nn.Module, *, draws: bool, weights: Sequence[torch.Tensor] = ()
    ) -> None:
        self._draws = draws
        self._random: dict[str, Any] | None = None
        self._watched = [*adapter_of(model).untrained(), *weights]
        self._moving = self._watched
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen: list[int] | None = None

    def keep(self) -> None:
        """Save the state before a forward that may fail."""
        if self._draws:
            self._random = random_state()
        if not self._watched:
            return
        versions = [tensor._version for tensor in self._watched]
        if self._seen is not None:
            known = self._moving if self._moving is not self._watched else []
            ids = {id(tensor) for tensor in known}
            changed = zip(self._watched, versions, self._seen, strict=True)
            self._moving = [
                tensor
                for tensor, now, was in changed
                if now != was or id(tensor) in ids or has_few_bytes(tensor)
            ]
        self._seen = versions
        self._kept = [(tensor, tensor.detach().clone()) for tensor in self._moving]

    def put_back(self) -> None:
        """Restore the state after a failed forward."""
        if self._random is not None:
            set_random_state(self._random)
        for tensor, value in self._kept:
            tensor.data.copy_(value)


class Snapshot:
    """Weights, buffers, gradients, modes, optimizer state and random states at one moment."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, compute: Any = None) -> None:
        # This comes first, because it updates pending rows of tables that are stepped by rows.
        self._states = [(o, copy.deepcopy(o.state_dict())) for o in as_tuple(optimizers)]
        self._weights = [
            (p, p.detach().clone(), None if p.grad is None else p.grad.detach().clone())
            for p in adapter_of(model).parameters()
        ]
        self._held = _held(model, compute)
        self._random = random_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything; parameters keep their identity and their present strides."""
        for optimizer, state in self._states:
            # The state is copied again, because the optimizer will write into the loaded state.
            optimizer.load_state_dict(copy.deepcopy(state))
        for parameter, value, gradient in self._weights:
            # .data hides the change from autograd graphs of the caller.
            parameter.data.copy_(value)
            # A gradient with other strides would mislead fused kernels.
            parameter.grad = None if gradient is None else _like(parameter, gradient)
        self._held.restore()
        for optimizer, _ in self._states:
            align_state(optimizer)
        set_random_state(self._random)


def _held(model: nn.Module, compute: Any) -> HeldState:
    return HeldState(model, compute, tensors=adapter_of(model).untrained())


def _like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.strided:
        return gradient.clone()
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
