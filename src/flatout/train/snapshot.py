"""Everything that a training step changes, taken and put back bit for bit."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flatout.data import randomness
from flatout.errors import ModelError
from flatout.models import adapter_of
from flatout.optim import Optimizers, align_state, as_tuple


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
        # Where there were other GPUs, those that both have.
        for device, item in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(item, device)


@contextmanager
def untouched(model: nn.Module, *, only_on_error: bool = False) -> Iterator[None]:
    """For a trial forward: afterwards buffers, modes and random states are as before.

    Args:
        model: its buffers and plain attributes (numbers, tensors, what lists hold) are put back.
        only_on_error: leave them as they are if the block ends well.

    Raises:
        ModelError: the model has buffers without a shape yet, which cannot be put back.
    """
    before = random_state()
    surroundings = _Surroundings(model)
    try:
        yield
    except BaseException:
        only_on_error = False
        raise
    finally:
        if not only_on_error:
            set_random_state(before)
            surroundings.restore()


_SMALL_BYTES = 65_536


class Moving:
    """What a model's forward changes in place of its buffers, to be put back after it has failed.

    At first all buffers are kept, then the small ones, as BatchNorm's, which changes them without
    a trace, and those whose version was seen to change: most large ones never do.

    Args:
        model: its buffers are watched, and of a Keras model what is not trained.
        draws: whether random generators are put back too.
    """

    def __init__(self, model: nn.Module, *, draws: bool) -> None:
        self._draws = draws
        self._random: dict[str, Any] | None = None
        self._watched = adapter_of(model).untrained()
        self._moving = self._watched
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen: list[int] | None = None

    def keep(self) -> None:
        """Before each forward that may fail."""
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
                if now != was or id(tensor) in ids or _has_few_bytes(tensor)
            ]
        self._seen = versions
        self._kept = [(tensor, tensor.detach().clone()) for tensor in self._moving]

    def put_back(self) -> None:
        """After one has."""
        if self._random is not None:
            set_random_state(self._random)
        for tensor, value in self._kept:
            tensor.data.copy_(value)


class Snapshot:
    """Weights, buffers, gradients, modes, optimizer state and random states at one moment.

    Args:
        model: its parameters and buffers are cloned on their device, its plain attributes kept.
        optimizers: one or several; their state dicts are copied.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers) -> None:
        # First, since it brings tables up to date that are stepped by rows.
        self._states = [(o, copy.deepcopy(o.state_dict())) for o in as_tuple(optimizers)]
        self._weights = [
            (p, p.detach().clone(), _clone(p.grad)) for p in adapter_of(model).parameters()
        ]
        self._surroundings = _Surroundings(model)
        self._random = random_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Bring everything back; parameters keep their identity and their present strides."""
        for optimizer, state in self._states:
            # Copied again, because the optimizer goes on to write into what it is given.
            optimizer.load_state_dict(copy.deepcopy(state))
        for parameter, value, gradient in self._weights:
            # .data: no graph of the caller may notice that the value came and went.
            parameter.data.copy_(value)
            # A gradient of other strides would mislead fused kernels.
            parameter.grad = None if gradient is None else _like(parameter, gradient)
        self._surroundings.restore()
        for optimizer, _ in self._states:
            align_state(optimizer)
        set_random_state(self._random)


class _Surroundings:
    """What a forward may change of a model: its buffers, and what it keeps in plain attributes.

    These are numbers and words, tensors such as the state of a cell between batches, and what
    lists, dicts and the like hold.
    """

    def __init__(self, model: nn.Module) -> None:
        # A scripted module lets its buffers be changed, and no names.
        names = (m._buffers for m in model.modules() if isinstance(m._buffers, dict))
        self._names = [(buffers, dict(buffers)) for buffers in names]
        self._attributes = [
            (m, set(vars(m)), {n: v for n, v in vars(m).items() if isinstance(v, _KEPT)})
            for m in model.modules()
        ]
        own = [
            value
            for module in model.modules()
            for name, value in vars(module).items()
            if name not in _OF_TORCH
        ]
        self._held = [(v, copy.copy(v)) for v in own if type(v) in _REFILLED and len(v) <= _MOST]
        self._values = [(tensor, _clone(tensor)) for tensor in adapter_of(model).untrained()]
        self._small = [(t, t._version, _clone(t)) for t in own if _is_small(t)]

    def restore(self) -> None:
        """Names of buffers that came since are taken away, and of tensors in attributes."""
        for buffers, before in self._names:
            buffers.clear()
            buffers.update(before)
        for buffer, value in self._values:
            # .data: no graph of the caller may notice that the value came and went.
            buffer.data.copy_(value)
        for tensor, version, value in self._small:
            if tensor._version != version:
                tensor.data.copy_(value)
        for held, before in self._held:
            _REFILLED[type(held)](held, before)
        for module, names, attributes in self._attributes:
            for name in vars(module).keys() - names:
                if _has_tensors(vars(module)[name]):
                    delattr(module, name)
            vars(module).update(attributes)


_KEPT = (bool, int, float, str, type(None), torch.Tensor, tuple)
_OF_TORCH = frozenset(vars(nn.Module()))
# What holds more, such as a vocabulary, is not looked at.
_MOST = 100_000


def _refill_list(held: Any, before: Any) -> None:
    held.clear()
    held.extend(before)


def _refill(held: Any, before: Any) -> None:
    held.clear()
    held.update(before)


_REFILLED: dict[type, Callable[[Any, Any], None]] = {
    list: _refill_list,
    deque: _refill_list,
    dict: _refill,
    set: _refill,
}


def _has_few_bytes(tensor: torch.Tensor) -> bool:
    """A sparse one does not know its bytes."""
    return tensor.layout is torch.strided and tensor.nbytes <= _SMALL_BYTES


def _is_small(value: Any) -> bool:
    """Whether it is a tensor of which a copy costs nothing."""
    return type(value) is torch.Tensor and _has_few_bytes(value) and not value.is_inference()


def _has_tensors(value: Any) -> bool:
    """Whether it is a tensor, or a few of them as an LSTM's state."""
    parts = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(part, torch.Tensor) for part in parts)


def _clone(tensor: torch.Tensor | None) -> Any:
    if tensor is not None and is_lazy(tensor):
        raise ModelError(
            "the model has a lazy layer with buffers, which have no shape before the first batch",
            do="call the model once on a batch before training, then make the optimizer",
        )
    return None if tensor is None else tensor.detach().clone()


def _like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.strided:
        return gradient.clone()
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
