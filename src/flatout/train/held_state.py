"""Saves and restores the state, other than weights, that a forward and a loss change.

A loss may count its calls, a hook may fill a list, a closure may hold a running mean. A check of a
batch must not change these, or training would continue from another state.

All objects that a model and the user's own functions refer to are visited: attributes, cells of
closures, defaults, globals that they name, and items of containers. Objects of libraries are
skipped, except modules, containers, random generators, and tensors and arrays up to a total size.
Some trained weights are saved too. A check makes no update, but a forward may itself write to
weights, as Keras' spectral norms, embeddings with max_norm and clipped weights do.
"""

from __future__ import annotations

import dis
import functools
import operator
import random
import threading
import weakref
from argparse import Namespace
from array import array
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import (
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flatout.data import is_library
from flatout.errors import ModelError

_SMALL_BYTES = 65_536
# Maximum total bytes of tensors and arrays above _SMALL_BYTES that are saved, such as the weights
# of a teacher model or a memory bank. Copying this number of bytes takes some milliseconds.
MOST_BYTES = 64 << 20
# Maximum total bytes of trained weights that are saved in later checks of a model. Of larger
# weights, only those that the model's forward changed in the first check are saved.
_MOST_AGAIN = 1 << 20
_MOVED: weakref.WeakKeyDictionary[nn.Module, dict[int, weakref.ref[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)
# Maximum number of items of a container, such as a vocabulary, that is saved and visited.
_MOST = 100_000
# Maximum number of objects in containers that are visited.
_MOST_WALKED = 10_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_KEPT = (bool, int, float, str, type(None), torch.Tensor, tuple)
_OF_TORCH = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if type(value) is OrderedDict)
_OF_PARAMETER = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Objects with an attribute of these types are not restored, because another thread may use them.
_OF_THREADS = (threading.Thread, type(threading.Lock()), type(threading.RLock()))
# Types of objects that are skipped. Some have their own state, which a check with updates restores
# itself. Others hold data in a file, which must not be written to.
_APART = (
    np.memmap,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    ModuleType,
    weakref.ProxyType,
    weakref.CallableProxyType,
)
# Names of attributes that are not restored, because a change of settings within a check sets and
# removes them.
_SWITCHED = frozenset(["forward"])
_MISSING = object()


class HeldState:
    """The saved state of objects and functions.

    Args:
        held: a model, and the user's functions that are called in its steps.
        tensors: tensors of any size that are also saved.
        most_bytes: largest total size of the tensors and arrays that are not small. The same limit
            holds for the trained weights, the smallest first, in a model's first check. Later
            checks save the weights that changed in the first check, and the small weights.

    Raises:
        ModelError: a module has lazy buffers, which cannot be saved before they have a shape.
    """

    def __init__(
        self,
        *held: Any,
        tensors: Iterable[torch.Tensor] = (),
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._restores: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # by id; keeps objects alive, so that no id is used twice
        self._left, self._bytes_left = _MOST_WALKED, most_bytes
        models = [one for one in held if isinstance(one, nn.Module)]
        trained = {id(p): p for one in models for p in one.parameters() if p.requires_grad}
        self._trained = trained.keys()
        self._models = models
        self._weights = _weights_within(
            trained.values(),
            min(most_bytes, _MOST_AGAIN) if all(one in _MOVED for one in models) else most_bytes,
            {at for one in models for at, w in _MOVED.get(one, {}).items() if w() is not None},
        )
        for tensor in tensors:
            self._keep_buffer(tensor)
        self._next: list[Any] = [*held]
        while self._next:
            value = self._next.pop()
            if not isinstance(value, _PLAIN) and self._is_new(value):
                self._look(value)
        self._seen.clear()

    def restore(self) -> None:
        """Restore all saved state; objects keep their identity."""
        for restore in self._restores:
            restore()
        moved = self._moved()
        for model in self._models:
            if model.training:  # else its forward may write less than in training
                _MOVED.setdefault(model, {}).update((id(w), weakref.ref(w)) for w, _ in moved)
        with _unseen():
            for weight, value in moved:
                weight.data.copy_(value)

    def moved_weights(self) -> list[torch.Tensor]:
        """Return the trained weights that have changed since they were saved."""
        return [weight for weight, _ in self._moved()]

    def _moved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        with _unseen():
            return [
                (w, value) for w, version, value in self._weights if _is_changed(w, version, value)
            ]

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _look(self, value: Any) -> None:
        if type(value) in _APART or isinstance(value, _APART):
            return
        if isinstance(value, nn.Module):
            self._look_at_module(value)
        elif isinstance(value, torch.Tensor):
            self._look_at_tensor(value)
        elif isinstance(value, np.ndarray):
            self._look_at_array(value)
        elif isinstance(value, _CONTAINERS) and _may_fill(type(value)):
            self._look_at_container(value)
        elif isinstance(value, (tuple, frozenset)):
            self._walk(value)
        elif isinstance(value, MethodType):
            self._next += [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            self._next += [value.func, value.args, value.keywords]
        elif isinstance(value, FunctionType):
            self._look_at_function(value)
        elif isinstance(value, type):
            self._look_at_class(value)
        elif (restore := _restore_of_generator(value)) is not None:
            self._restores.append(restore)
        else:
            self._look_at_object(value)

    def _walk(self, values: Iterable[Any]) -> None:
        for value in values:
            if not isinstance(value, _PLAIN):
                if self._left <= 0:
                    return
                self._left -= 1
                self._next.append(value)

    def _look_at_module(self, module: nn.Module) -> None:
        of_module = vars(module)
        # A scripted module allows changes of its buffers, but not of names.
        if isinstance(module._buffers, dict):
            self._restores.append(partial(_refill_dict, module._buffers, dict(module._buffers)))
        for buffer in module._buffers.values():
            if buffer is not None:
                self._keep_buffer(buffer)
        self._next += module._modules.values()
        for parameter in module._parameters.values():
            self._next += [getattr(parameter, name, None) for name in _OF_PARAMETER]
            if parameter is not None and id(parameter) not in self._trained:
                self._next.append(parameter)
        for name in _HOOKS:
            self._walk(of_module.get(name, {}).values())
        keep = _put_back if _is_own(type(module)) else _put_back_plain
        self._restores.append(partial(keep, module, dict(of_module)))
        self._next += [value for name, value in of_module.items() if name not in _OF_TORCH]
        self._next.append(type(module))

    def _keep_buffer(self, buffer: torch.Tensor) -> None:
        if self._is_new(buffer):
            with _unseen():  # buffers may include frozen weights of Keras
                self._restores.append(partial(_refill_buffer, buffer, clone_of(buffer)))

    def _look_at_tensor(self, tensor: torch.Tensor) -> None:
        if _is_plain(tensor) and self._pays_for(tensor.nbytes):
            with _unseen():
                kept = partial(_refill_tensor, tensor, tensor._version, clone_of(tensor))
            self._restores.append(kept)

    def _look_at_array(self, array: np.ndarray[Any, Any]) -> None:
        is_plain = array.flags.writeable and not array.dtype.hasobject
        if is_plain and self._pays_for(array.nbytes):
            self._restores.append(partial(np.copyto, array, array.copy()))

    def _pays_for(self, size: int) -> bool:
        if size <= _SMALL_BYTES:
            return True
        self._bytes_left -= size
        return self._bytes_left >= 0

    def _look_at_container(self, held: Any) -> None:
        if len(held) <= _MOST:
            refill = next(how for kind, how in _REFILLED.items() if isinstance(held, kind))
            self._restores.append(partial(refill, held, _copied(held)))
            self._walk([*held.values()] if isinstance(held, dict) else [*held])
        if not is_library(type(held)):
            self._look_at_object(held)  # a user's own class may have further attributes

    def _look_at_function(self, function: FunctionType) -> None:
        is_own = not is_library(function)
        for cell in function.__closure__ or ():
            value = _content(cell)
            if is_own:
                self._restores.append(partial(_refill_cell, cell, value))
            if is_own or callable(value):
                self._next.append(value)
        if not is_own:
            return
        self._next += [function.__defaults__, function.__kwdefaults__, vars(function)]
        names, stored = _global_names(function.__code__)
        where = function.__globals__
        self._next += [where.get(name) for name in names]
        if stored:
            before = {name: where.get(name, _MISSING) for name in stored}
            self._restores.append(partial(_refill_names, where, before))

    def _look_at_class(self, kind: type) -> None:
        for one in kind.__mro__:
            if is_library(one):
                continue
            own = {n: v for n, v in vars(one).items() if not n.startswith("__") or callable(v)}
            kept = {name: value for name, value in own.items() if isinstance(value, _KEPT)}
            if kept:
                self._restores.append(partial(_put_back_of_class, one, kept))
            self._next += [getattr(value, "__func__", value) for value in own.values()]

    def _look_at_object(self, thing: Any) -> None:
        if is_library(type(thing)) and not isinstance(thing, _LIKE_OWN):
            if type(thing).__module__.startswith("flatout."):
                self._next += getattr(thing, "own_parts", [])
            return
        held = {**getattr(thing, "__dict__", {}), **_slots_of(thing)}
        if not any(isinstance(value, _OF_THREADS) for value in held.values()):
            self._restores.append(partial(_put_back, thing, held))
            self._next += [*held.values(), type(thing)]


def has_few_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense and small enough to copy at no cost."""
    return tensor.layout is torch.strided and tensor.nbytes <= _SMALL_BYTES


def clone_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached copy of a tensor."""
    if is_lazy(tensor):
        raise ModelError(
            "the model has a lazy layer with buffers, which have no shape before the first batch",
            do="call the model once on a batch before training, then make the optimizer",
        )
    return tensor.detach().clone()


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta  # Keras computes shapes with these, which have no data
        and not tensor.is_inference()
    )


def _weights_within(
    weights: Iterable[torch.Tensor], most_bytes: int, moved: Collection[int]
) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
    kept = []
    with _unseen():
        for weight in sorted(filter(_is_plain, weights), key=lambda weight: weight.nbytes):
            most_bytes -= weight.nbytes if id(weight) not in moved else 0
            if most_bytes < 0 and id(weight) not in moved:
                continue
            if weight.untyped_storage().nbytes() >= weight.nbytes:  # else its memory was freed
                kept.append((weight, weight._version, clone_of(weight)))
    return kept


def _unseen() -> AbstractContextManager[None]:
    return torch._C.DisableTorchFunction()


def _is_own(kind: type) -> bool:
    return not is_library(kind) and not any(
        base.__module__.startswith("keras.") for base in kind.__mro__
    )


def _refill_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    # .data hides the change from autograd graphs of the caller.
    with _unseen():
        buffer.data.copy_(value)


def _refill_tensor(tensor: torch.Tensor, version: int, value: torch.Tensor) -> None:
    # .data changes no version; an unchanged tensor may lie in read-only memory, so it is skipped.
    with _unseen():
        if _is_changed(tensor, version, value):
            tensor.data.copy_(value)


def _is_changed(tensor: torch.Tensor, version: int, value: torch.Tensor) -> bool:
    return tensor._version != version or not _is_same(tensor, value)


def _is_same(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    tensor = tensor.detach()
    try:
        return torch.equal(tensor, value) or bool(
            ((tensor == value) | ((tensor != tensor) & (value != value))).all()
        )
    except RuntimeError:  # torch cannot compare this dtype; an unchanged version suffices
        return True


def _refill_list(held: Any, before: Any) -> None:
    if len(held) != len(before) or not all(map(operator.is_, held, before)):
        kind = deque if isinstance(held, deque) else list
        kind.clear(held)
        kind.extend(held, before)


def _refill_dict(held: Any, before: Any) -> None:
    if [*map(id, held)] != [*map(id, before)] or not all(
        map(operator.is_, held.values(), before.values())
    ):
        dict.clear(held)
        dict.update(held, before)  # a Counter's own update would add


def _refill_set(held: Any, before: Any) -> None:
    if set.__ne__(held, before):
        set.clear(held)
        set.update(held, before)


def _refill_values(held: Any, before: Any) -> None:
    if held != before:
        held[:] = before


_REFILLED: dict[type, Callable[[Any, Any], None]] = {
    list: _refill_list,
    deque: _refill_list,
    set: _refill_set,
    dict: _refill_dict,
    bytearray: _refill_values,
    array: _refill_values,
}
_CONTAINERS = tuple(_REFILLED)
# A class that overrides one of these methods may yield other items than it stores, so its objects
# are not restored.
_READ = ("__getitem__", "__iter__", "keys", "values", "items")
_PYTHONS = ("builtins", "collections", "array")
_OF_PYTHON = (*_CONTAINERS, OrderedDict, defaultdict, Counter)
# Python's own classes that only store the user's objects.
_LIKE_OWN = (UserDict, UserList, SimpleNamespace, Namespace)


def _may_fill(kind: type) -> bool:
    if kind in _OF_PYTHON:
        return True
    own = [vars(base) for base in kind.__mro__ if base.__module__ not in _PYTHONS]
    return not is_library(kind) and not any(name in one for one in own for name in _READ)


def _copied(held: Any) -> Any:
    for kind in (dict, list, deque, set):
        if isinstance(held, kind):
            return kind(held)
    return held[:]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return _MISSING


def _refill_cell(cell: CellType, value: Any) -> None:
    if _content(cell) is value:
        return
    if value is _MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def _refill_names(names: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _MISSING:
            names.pop(name, None)
        elif names.get(name, _MISSING) is not value:
            names[name] = value


def _put_back(thing: Any, before: dict[str, Any]) -> None:
    now = {**getattr(thing, "__dict__", {}), **_slots_of(thing)}
    for name in now.keys() - before.keys() - _SWITCHED:
        object.__delattr__(thing, name)
    for name, value in before.items():
        if name not in _SWITCHED and now.get(name, _MISSING) is not value:
            object.__setattr__(thing, name, value)


def _put_back_plain(module: nn.Module, before: dict[str, Any]) -> None:
    for name in vars(module).keys() - before.keys():
        if _has_tensors(vars(module)[name]):
            delattr(module, name)
    vars(module).update({n: v for n, v in before.items() if isinstance(v, _KEPT)})


def _put_back_of_class(kind: type, before: dict[str, Any]) -> None:
    for name, value in before.items():
        if vars(kind).get(name, _MISSING) is not value:
            setattr(kind, name, value)


def _has_tensors(value: Any) -> bool:
    parts = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(part, torch.Tensor) for part in parts)


def _slots_of(thing: Any) -> dict[str, Any]:
    held = {}
    for kind in type(thing).__mro__:
        if "__slots__" in vars(kind):
            for name, member in vars(kind).items():
                if isinstance(member, MemberDescriptorType):
                    with suppress(AttributeError):  # the attribute in `__slots__` is not set
                        held[name] = member.__get__(thing)
    return held


def _refill_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _restore_of_generator(value: Any) -> Callable[[], None] | None:
    if isinstance(value, torch.Generator):
        return partial(_refill_generator, value, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


@functools.lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    names: set[str] = set()
    stored: set[str] = set()
    for one in _codes(code):
        names.update(one.co_names)
        stored.update(i.argval for i in dis.get_instructions(one) if i.opname == "STORE_GLOBAL")
    return frozenset(names), frozenset(stored)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
