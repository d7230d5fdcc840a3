"""A forward as the sequence of calls that its inputs reach, with the inputs and outputs of each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten

from flatout.measure import finish_device
from flatout.models.frozen.calls import Frame, Key, Path, is_transparent
from flatout.models.frozen.stand_in import StandIn, about, name_of, stand_ins, with_values
from flatout.models.keras.layers import has_layers, is_layer

_SMALL_BYTES = 65_536
# Maximum difference that counts as rounding, as a fraction of the largest absolute value. _SHARES:
# by dtype on a CPU, whose kernels sum in another order for other batch sizes. _ON_DEVICES: for
# float32 on a GPU, whose kernels may also round factors to TF32, or use transforms such as
# Winograd's. _IN_HALF: for half precision.
_SHARES = {torch.float64: 1e-8, torch.float32: 1e-4}
_ON_DEVICES, _IN_HALF = 5e-3, 2e-2
# torch's modules that hold other modules, and only call them.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.TransformerEncoder)


@dataclass
class OutputStructure:
    """The structure that a call returns.

    Attributes:
        spec: the structure's tree spec.
        leaves: for each leaf, whether it is a recorded value, and the value's id or else the leaf
            itself.
    """

    spec: TreeSpec
    leaves: list[tuple[bool, Any]]

    def numbers(self) -> list[int]:
        """Return the ids of the values in the structure."""
        return [leaf for is_value, leaf in self.leaves if is_value]


@dataclass
class Event:
    """A call of a function, or of a module that is recorded as a whole.

    Attributes:
        path: the calls of the containers around this call.
        name: the module's name in the model, or the function's name after a colon.
        module: the module that is called, or None.
        reads: ids of the values that the call gets.
        given: structure of the call's output; None if the output contains no tensor.
        writes: for each stand-in that the call changes: its index among the call's stand-in
            arguments, and the id of its new value.
        stores: addresses of the tensors' memory that the call writes.
        is_trained: whether the call uses a parameter that is trained.
        weighs: whether the call uses weights.
        spent: duration of the call, in nanoseconds.
        constants: text of the call's arguments other than tensors.
        why: the reason why the result cannot be kept though the call trains nothing; "" without
            one.
        key: key of the call in runs that record all calls.
    """

    path: Path
    name: str
    module: Any
    reads: list[int]
    given: OutputStructure | None = None
    writes: list[tuple[int, int]] = field(default_factory=list)
    stores: set[int] = field(default_factory=set)
    is_trained: bool = False
    weighs: bool = False
    why: str = ""
    from_outside: bool = False
    spent: int = 0
    constants: str = ""
    key: Key | None = None

    def gives(self) -> list[int]:
        """Return the ids of all values that the call makes or changes."""
        own = [] if self.given is None else self.given.numbers()
        return [*own, *(number for _, number in self.writes)]


@dataclass
class Call:
    """A call of a module with calls in it.

    Attributes:
        key: identifies the call.
        module: the module that is called.
        start, stop: the range of indices of the events within the call.
        given: structure of the call's output; None if the output has a tensor that no event made.
    """

    key: Key
    module: Any
    start: int
    stop: int = 0
    given: OutputStructure | None = None
    is_leaf: bool = False


class Read(NamedTuple):
    """A tensor that a function got, and that is no stand-in.

    Attributes:
        tensor: the tensor that was read.
        at: index of the event that read the tensor. If `is_within` is false, the tensor was read
            before this event, and any later event may use a value that was made of the tensor.
        is_within: whether the event `at` itself read the tensor.
        is_in_module: whether a module that is recorded as a whole read the tensor, and may have
            made the tensor of its inputs.
    """

    tensor: torch.Tensor
    at: int
    is_within: bool
    is_in_module: bool


class ForwardRecording(TorchFunctionMode):
    """Records the calls of one forward.

    Attributes:
        events, calls: recorded events, and calls of modules that contain events, in order of time.
        values: all tensors that recorded calls made, by id.
        tensors_read: tensors that functions got and no recorded call made.
        stopped_at, stopped_why: index of the event from which the recording is not certain, and the
            reason.
        given: structure of the output of the whole forward.
    """

    def __init__(self, parts: dict[str, Any], opaque: set[str], *, as_written: bool) -> None:
        super().__init__()
        self.as_written = as_written
        self._parts = parts
        self._opaque = opaque
        self._inside = 0  # number of active calls of modules that are recorded as a whole
        self._frame = Frame(())
        self._drawn = _random()
        self.events: list[Event] = []
        self.calls: list[Call] = []
        self.values: dict[int, torch.Tensor] = {}
        self.inputs: list[int] = []
        self.tensors_read: list[Read] = []
        self.stopped_at: int | None = None
        self.stopped_why = ""
        self.given: OutputStructure | None = None
        self.failed_in = ""

    def take(self, value: torch.Tensor) -> StandIn:
        made = self._stand_in(value)
        self.inputs.append(made.number)
        return made

    def _stand_in(self, value: torch.Tensor) -> StandIn:
        number = len(self.values)
        self.values[number] = value
        return StandIn.of(self, number, value)

    def _stop(self, why: str) -> None:
        if self.stopped_at is None:
            self.stopped_at, self.stopped_why = len(self.events), why

    # -- functions -----------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.function(func, args, kwargs or {})

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(function)
        answer = about(name, function, args, kwargs)
        if answer is not NotImplemented:
            return answer
        is_reached = next(stand_ins((args, kwargs)), None) is not None
        self._note_reads((args, kwargs), within=is_reached or self._inside > 0)
        if is_reached:
            event = Event(self._frame.path, f":{name}", None, [])
            return self._run(event, function, args, kwargs)
        if self._inside:
            return function(*args, **kwargs)
        return self._outside(name, function, args, kwargs)

    def _note_reads(self, given: Any, *, within: bool) -> None:
        for tensor in _tensors(given):
            if not isinstance(tensor, StandIn):
                read = Read(tensor, len(self.events), within, self._inside > 0)
                self.tensors_read.append(read)

    def _outside(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        before = self._drawn_since()
        result = function(*args, **kwargs)
        drew = self._drawn_since() or _has_generator(kwargs)
        if before:
            self._stop("forward draws random numbers in Python")
        is_trained = any(t.requires_grad for t in _tensors((args, kwargs)))
        hides = is_trained and not any(t.requires_grad for t in _tensors(result))
        if not (drew or hides) or not any(True for _ in _tensors(result)):
            return result
        event = Event(self._frame.path, f":{name}", None, [], from_outside=True)
        event.is_trained = is_trained
        event.why = "draws random numbers" if drew else ""
        self.events.append(event)
        return self._wrapped(event, result, {}, {})

    # -- modules -------------------------------------------------------------------------------

    def module(
        self,
        name: str,
        call: Callable[..., Any],
        written: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._inside:
            return call(*args, **kwargs)
        part = self._parts[name]
        key = self._frame.key(name)
        noted = Call(key, part, len(self.events), is_leaf=self._is_leaf(name, part))
        self.calls.append(noted)
        outer, self._frame = (
            self._frame,
            self._frame if is_transparent(part) else self._frame.inside(key),
        )
        try:
            if noted.is_leaf:
                event = Event(outer.path, name, part, [], key=key)
                result = self._run(event, call, args, kwargs)
            else:
                result = written(*args, **kwargs)
        except Exception:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self._frame = outer
        noted.stop = len(self.events)
        noted.given = _given(result)
        return result

    def _is_leaf(self, name: str, part: Any) -> bool:
        if name in self._opaque:
            return True
        if is_layer(part):
            return not has_layers(part)
        if isinstance(part, nn.TransformerEncoder):
            # TransformerEncoder writes into a mask that it makes, so no cut can be inside of it. A
            # completely frozen encoder needs no cut inside.
            return not any(p.requires_grad for p in part.parameters())
        is_torchs = type(part).__module__.startswith("torch.")
        return is_torchs and not isinstance(part, _CONTAINERS)

    # -- both ----------------------------------------------------------------------------------

    def _run(self, event: Event, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            given = list(stand_ins((args, kwargs)))
            real = with_values((args, kwargs))
            versions = [(tensor, tensor._version) for tensor in _tensors(real)]
            own = [] if event.module is None else tensors_of(event.module)
            before = [_mark(tensor) for tensor in own]
            if self._drawn_since():
                self._stop("forward draws random numbers in Python")
            event.constants = _constants(args, kwargs)
        self._inside += event.module is not None
        finish_device()
        began = time.perf_counter_ns()
        try:
            result = call(*real[0], **real[1])
            finish_device()
        finally:
            event.spent = time.perf_counter_ns() - began
            self._inside -= event.module is not None
        with torch._C.DisableTorchFunction():
            event.reads = list(dict.fromkeys(item.number for item in given))
            written = {id(tensor): tensor for tensor, old in versions if tensor._version != old}
            inner = {id(item.value): item for item in given}
            event.stores = {store_of(tensor) for tensor in written.values()}
            weights = [] if event.module is None else list(event.module.parameters())
            weights += [t for t in _tensors(real) if isinstance(t, nn.Parameter)]
            event.weighs = bool(weights)
            event.is_trained = any(t.requires_grad for t in [*weights, *_tensors((real, result))])
            if self._drawn_since() or _has_generator(kwargs):
                event.why = "draws random numbers"
            elif not all(_is_marked(tensor, old) for tensor, old in zip(own, before, strict=True)):
                event.why = "changes its own buffers"
            if any(tensor not in inner for tensor in written):
                self._stop("writes into a tensor that forward made")
            self.events.append(event)
            return self._wrapped(event, result, inner, written, given)

    def _wrapped(
        self,
        event: Event,
        result: Any,
        inner: dict[int, StandIn],
        written: dict[int, torch.Tensor],
        given: list[StandIn] | None = None,
    ) -> Any:
        for at, item in enumerate(given or []):
            if id(item.value) in written and all(at != place for place, _ in event.writes):
                number = len(self.values)
                self.values[number] = written[id(item.value)]
                for place, same in enumerate(given or []):
                    if same is item:
                        event.writes.append((place, number))
                item.number = number
                written = {k: v for k, v in written.items() if k != id(item.value)}
        leaves, spec = tree_flatten(result)
        made = [
            (inner[id(leaf)] if id(leaf) in inner else self._stand_in(leaf))
            if torch.is_tensor(leaf)
            else leaf
            for leaf in leaves
        ]
        wrapped = spec.unflatten(made)
        if not any(isinstance(leaf, StandIn) for leaf in made) and not event.writes:
            self._stop(f"forward reads the numbers in a tensor ({event.name.lstrip(':')})")
            return result
        event.given = OutputStructure(spec, [_leaf(item) for item in made])
        return wrapped

    def _drawn_since(self) -> bool:
        before, self._drawn = self._drawn, _random()
        return before != self._drawn


@contextmanager
def nothing_random() -> Iterator[None]:
    """Restore the state of all random generators after the block."""
    torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    devices = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)
        for state in devices:
            torch.cuda.set_rng_state(state)


def _random() -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():
        own = torch.default_generator.get_state().numpy().tobytes()
        device = b""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            device = torch.cuda.get_rng_state().numpy().tobytes()
    _, words, at, *_ = np.random.get_state()
    return own, device, random.getstate(), at, np.asarray(words).tobytes()


def _mark(tensor: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    return tensor._version, tensor.detach().clone() if tensor.nbytes <= _SMALL_BYTES else None


def _is_marked(tensor: torch.Tensor, mark: tuple[int, torch.Tensor | None]) -> bool:
    version, value = mark
    return tensor._version == version and (value is None or is_same(tensor, value))


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two results differ by no more than rounding. Integers must be equal.

    Args:
        a, b: tensors of the same shape, dtype and device.
    """
    if a.shape != b.shape or not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    share = _SHARES.get(a.dtype, _IN_HALF)
    if a.dtype == torch.float32 and a.device.type != "cpu":
        share = _ON_DEVICES
    if a.dtype not in _SHARES:
        a, b = a.float(), b.float()
    apart = float(torch.linalg.vector_norm(a - b, torch.inf))
    return apart <= share * float(torch.linalg.vector_norm(a, torch.inf))


def _has_generator(kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Generator) for value in kwargs.values())


def _given(result: Any) -> OutputStructure | None:
    leaves, spec = tree_flatten(result)
    if any(torch.is_tensor(leaf) and not isinstance(leaf, StandIn) for leaf in leaves):
        return None
    return OutputStructure(spec, [_leaf(leaf) for leaf in leaves])


def _constants(args: Any, kwargs: Any) -> str:
    leaves, spec = tree_flatten((args, kwargs))
    plain = (bool, int, float, complex, str, type(None), type(...), torch.dtype)
    words = []
    for leaf in leaves:
        is_told = isinstance(leaf, plain) or (isinstance(leaf, slice) and not [*stand_ins(leaf)])
        if isinstance(leaf, (np.generic, np.ndarray)) and leaf.dtype.kind != "O":
            words.append(f"{leaf.dtype} {leaf.shape} {sha256(leaf.tobytes()).hexdigest()}")
        else:
            words.append(repr(leaf) if is_told else type(leaf).__name__)
    return f"{spec.num_leaves} {sorted(kwargs)} {', '.join(words)}"


def _leaf(leaf: Any) -> tuple[bool, Any]:
    return (True, leaf.number) if isinstance(leaf, StandIn) else (False, leaf)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


def tensors_of(module: Any) -> list[torch.Tensor]:
    """Return the parameters, buffers and plain tensors of a module and of the modules in it."""
    own = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        own += [value for value in vars(part).values() if torch.is_tensor(value)]
    return own


def store_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
