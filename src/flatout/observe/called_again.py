"""Repeated call of a model, to test if an output changes with the token that it is to predict.

The script's training is not affected. Random states, modes, buffers and other state of the model
and of the user's objects are restored (train/held_state.py). A model is not called if the code of
its forward does more than compute.

A change is reported only where the whole model sees future tokens by mistake. An encoder may see
all tokens, and its decoder may see the encoder's output. Therefore the inputs of each layer are
checked for changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from flatout.hooks import after_forward, before_forward
from flatout.observe.shifted_targets import Place, as_rows, tensors_in
from flatout.observe.sites import is_users

# Changes as a share of the standard deviation of an output over its classes. _ROUNDING: smallest
# real change; _HALF_ROUNDING: smallest real change where a layer computes in half precision;
# _OTHERS: largest change of other samples, as a share of the change of the token's own sample.
_ROUNDING, _HALF_ROUNDING, _OTHERS = 1e-4, 2e-2, 1e-2
# Maximum number of values that are compared of an input without positions.
_NUMBERS = 2**20
# Number of other samples of the batch that must not change.
_BESIDE = 2
# Names in a forward's code which show that the forward does more than compute.
_ACTS = frozenset(
    (
        "print", "open", "write", "writelines", "save", "savetxt", "add_scalar", "add_histogram",
        "info", "debug", "warning", "send", "put", "put_nowait", "backward", "step", "sleep",
        "all_reduce", "all_gather", "broadcast", "input", "exit", "breakpoint", "set_trace",
        "all_gather_into_tensor", "all_to_all", "all_to_all_single", "barrier", "irecv", "isend",
        "recv", "reduce_scatter", "reduce_scatter_tensor",
    )
)  # fmt: skip
# Classes of modules that wait for other ranks, or run in several threads.
_SHARED = (
    "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "SyncBatchNorm",
)  # fmt: skip


class Sees(NamedTuple):
    """Finding that a model sees future tokens.

    Attributes:
        change: change of an output, as a share of its standard deviation over the classes.
        layer, kind: name and class of the layer in which the change begins; "" where unknown.
    """

    change: float
    layer: str
    kind: str


def sees_ahead(torch: Any, module: Any, place: Place) -> Sees | None:
    """Return a finding if the output that is to predict a token changes with that token."""
    if not can_be_called_again(torch, module):
        return None
    try:
        with _untouched(torch, module) as put_back:
            again = _Again(torch, module, place, put_back)
            change = again.change()
            if change is None or not again.is_same():
                return None
            # Trace the model once more in train mode, where the model may use another mask.
            traced = _Traces(torch, module, place)
            in_training = again.change(traced)
            least = _HALF_ROUNDING if traced.is_half else _ROUNDING
            if in_training is None or min(change, in_training) < least or traced.is_meant():
                return None
            return Sees(change, *traced.layer)
    except Exception:
        return None  # the model cannot be called in this way


class _Again:
    """Calls of a model with a batch, and with one token of it replaced."""

    def __init__(self, torch: Any, module: Any, place: Place, put_back: Callable[[], None]) -> None:
        self._torch, self._module, self._place = torch, module, place
        self._put_back = put_back
        samples = place.shape[0]
        # The token's own sample, and some other samples whose outputs must not change.
        self._rows = [(place.row + at) % samples for at in range(min(samples, 1 + _BESIDE))]
        self._base: Any = None

    def change(self, traced: _Traces | None = None) -> float | None:
        place = self._place
        outputs = []
        for token in (place.token, place.other):
            with traced.of_a_call() if traced is not None else nullcontext():
                outputs.append(self._call(token, training=traced is not None))
        base, other = outputs
        apart = (other - base).abs().amax(2)
        spread, change = float(base[0, place.at].std()), float(apart[0, place.at])
        if not change > _ROUNDING * spread > 0:
            return None
        if traced is None:
            self._base = base
            if len(apart) > 1 and float(apart[1:].max()) > _OTHERS * change:
                return None
        return change / spread

    def is_same(self) -> bool:
        again = self._call(self._place.token, training=False)
        apart = (again - self._base)[0].abs().max()
        return bool(apart <= _ROUNDING * _OTHERS * self._base[0, self._place.at].std())

    def _call(self, token: int, *, training: bool) -> Any:
        torch, place = self._torch, self._place
        self._put_back()
        if not training:
            for inner in self._module.modules():
                inner.training = False
        given = place.given_with(torch, token)
        with torch.no_grad():
            gave = self._module(*given["args"], **given["kwargs"])
        number, name = place.output
        output = [tensor for _, tensor in tensors_in(torch, gave)][number].detach()
        return dict(as_rows(output, place.shape))[name][self._rows].float()


# -- restored state --------------------------------------------------------------------------------


@contextmanager
def _untouched(torch: Any, module: Any) -> Iterator[Callable[[], None]]:
    from flatout.train import HeldState, random_state, set_random_state

    state = random_state()
    modes = [(inner, inner.training) for inner in module.modules()]
    held = HeldState(module)

    def put_back() -> None:
        held.restore()
        for inner, mode in modes:
            inner.training = mode
        set_random_state(state)

    mha = torch.backends.mha
    settings = (
        # The fused path runs no hooks, and drops positions that are padding in all samples.
        (mha.set_fastpath_enabled, mha.get_fastpath_enabled()),
        # The next forward must not find tensors that were cast without gradients.
        (torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
    )
    for switch, _ in settings:
        switch(False)
    try:
        yield put_back
    finally:
        for switch, before in settings:
            switch(before)
        put_back()


def can_be_called_again(torch: Any, module: Any) -> bool:
    """Return whether a model's forward only computes, as far as its code shows."""
    hooks = torch.nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return False
    if any(type(tensor).__name__ == "DTensor" for tensor in module.parameters()):
        return False  # each rank holds a part of the model
    for inner in module.modules():
        kind = type(inner)
        if isinstance(inner, torch.jit.ScriptModule) or kind.__name__ in _SHARED:
            return False
        if getattr(inner, "_compiled_call_impl", None) is not None:
            return False
        if _acts(getattr(inner.forward, "__func__", inner.forward), kind):
            return False
        for hook in (*inner._forward_hooks.values(), *inner._forward_pre_hooks.values()):
            if not _is_harmless(hook):
                return False
    return True


def _is_harmless(hook: Any) -> bool:
    if (getattr(hook, "__module__", None) or "").startswith("torch."):
        return True
    function = getattr(hook, "__func__", hook)
    is_own = isinstance(function, FunctionType) and is_users(function.__code__.co_filename)
    return is_own and not _acts(function, None)


def _acts(function: Any, kind: type | None) -> bool:
    todo, known = [function], set()
    while todo:
        one = todo.pop()
        if not isinstance(one, FunctionType) or one in known:
            continue
        known.add(one)
        if not is_users(one.__code__.co_filename):
            continue
        names = {name for code in _codes(one.__code__) for name in code.co_names}
        if names & _ACTS:
            return True
        within = [vars(base) for base in kind.__mro__] if kind is not None else []
        found = [where.get(name) for where in (*within, one.__globals__) for name in names]
        todo += [getattr(item, "fget", getattr(item, "__func__", item)) for item in found]
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


# -- inputs and outputs of layers ------------------------------------------------------------------


class _Seen(NamedTuple):
    """A tensor in a layer's input or output, for the sample alone.

    Attributes:
        kind: "tokens"; "places" for numbers per position of the sequence; "pooled" for all other
            numbers.
        values: a copy of the tensor.
    """

    kind: str
    values: Any


class _Event(NamedTuple):
    """Beginning or end of a layer's call, with its input or output."""

    name: str
    kind: str
    is_end: bool
    tensors: list[_Seen]
    is_one_way: bool  # a recurrent layer in one direction


class _Traces:
    """Inputs and outputs of a model's layers, with the original token and with a replaced token."""

    def __init__(self, torch: Any, module: Any, place: Place) -> None:
        self._torch, self._module, self._place = torch, module, place
        self._calls: list[list[_Event]] = []
        self.is_half = False
        self.layer = "", ""

    @contextmanager
    def of_a_call(self) -> Iterator[None]:
        events: list[_Event] = []
        handles = []
        for name, inner in self._module.named_modules():
            if isinstance(inner, self._torch.nn.modules.loss._Loss):
                continue
            begins, ends = self._hooks(name, events)
            handles.append(before_forward(inner, begins, with_kwargs=True))
            handles.append(after_forward(inner, ends))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._calls.append(events)

    def _hooks(
        self, name: str, events: list[_Event]
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        def begins(layer: Any, args: Any, kwargs: Any) -> None:
            events.append(self._event(name, layer, [args, kwargs], is_end=False))

        def ends(layer: Any, args: Any, output: Any) -> None:
            events.append(self._event(name, layer, output, is_end=True))

        return begins, ends

    def _event(self, name: str, layer: Any, value: Any, *, is_end: bool) -> _Event:
        is_recurrent = isinstance(layer, self._torch.nn.RNNBase)
        tensors = [tensor.detach() for _, tensor in tensors_in(self._torch, value)]
        self.is_half |= any(item.dtype.itemsize == 2 for item in tensors if _is_number(item))
        if is_recurrent and is_end:
            tensors = tensors[:1]  # the final states depend on the whole sequence
        seen = [self._seen(item) for item in tensors]
        if is_recurrent and not is_end:
            states = [item.clone() for item in tensors[1:] if _is_number(item)]
            seen = [*seen[:1], *(_Seen("pooled", state) for state in states)]
        one_way = is_recurrent and not layer.bidirectional
        kind = type(layer).__name__
        return _Event(name, kind, is_end, [item for item in seen if item is not None], one_way)

    def _seen(self, tensor: Any) -> _Seen | None:
        if not _is_number(tensor):
            is_tokens = tensor.dim() >= 1 and tensor.dtype in (self._torch.int64, self._torch.int32)
            return _Seen("tokens", tensor.clone()) if is_tokens else None
        rows = self._place.shape[0]
        squeezed = [size for size in tensor.shape if size != 1]
        others = [size for at, size in enumerate(squeezed) if at or size != rows]
        if len(others) <= 1:
            few = tensor.numel() <= _NUMBERS
            return _Seen("pooled", tensor.clone()) if few else None
        values = self._by_place(tensor)
        return None if values is None else _Seen("places", values.clone())

    def _by_place(self, tensor: Any) -> Any:
        place, shape = self._place, tensor.shape
        rows, length = (int(size) for size in place.tokens.shape)
        lengths = (length, length - 1, length + 1)
        mine: Any = None
        if shape[0] == rows and shape[1] in lengths:
            mine = tensor[place.row]
        elif shape[1] == rows and shape[0] in lengths:
            mine = tensor[:, place.row]
        elif shape[0] == rows and tensor.dim() > 2 and shape[2] in lengths:
            mine = tensor[place.row].transpose(0, 1)
        elif shape[0] in (rows * length, rows * (length - 1)):
            size = int(shape[0]) // rows
            order = (rows, size) if place.is_first else (size, rows)
            whole = tensor.reshape(*order, *shape[1:])
            mine = whole[place.row] if place.is_first else whole[:, place.row]
        elif shape[0] in lengths:
            mine = tensor
        return None if mine is None else mine.reshape(len(mine), -1)

    def is_meant(self) -> bool:
        before, after = self._calls
        if [event[:3] for event in before] != [event[:3] for event in after]:
            return True
        way = _Way()
        for one, other in zip(before, after, strict=True):
            changes = self._changes(one, other)
            if changes is None or (way.ends if one.is_end else way.begins)(one, changes):
                return True
        self.layer = way.layer
        return False

    def _changes(self, one: _Event, other: _Event) -> set[str] | None:
        if len(one.tensors) != len(other.tensors):
            return None
        changes = set()
        for (kind, values), (_, now) in zip(one.tensors, other.tensors, strict=True):
            if values.shape != now.shape:
                return None
            if kind == "tokens":
                if not self._torch.equal(values, now):
                    changes.add(kind)
                continue
            apart = (now.float() - values.float()).abs()
            least = _ROUNDING * values.float().abs().mean()
            if kind == "pooled":
                if bool((apart > least).any()):
                    changes.add(kind)
                continue
            differs = (apart > least).any(1)
            if bool(differs[: self._place.at + 1].any()):
                changes.add("early")
            elif bool(differs.any()):
                changes.add("late")
        return changes


class _Open:
    """A layer that is being called.

    Attributes:
        is_clean: whether no input has changed at positions before the replaced token.
        is_mixed: whether one input sequence has changed before the replaced token, and another
            sequence only after that token.
        has_inner: whether the layer has called a submodule.
    """

    def __init__(self, changes: set[str]) -> None:
        self.is_clean = "early" not in changes
        self.is_mixed = {"early", "late"} <= changes
        self.has_inner = False


class _Way:
    """Path of a change through the layers, from later to earlier positions.

    Attributes:
        layer: name and class of the layer whose output is the first to change at positions before
            the replaced token.
    """

    def __init__(self) -> None:
        self.layer = "", ""
        self._open: list[_Open] = []
        self._is_ahead = self._has_one_way = False
        self._given: set[str] = set()  # names of layers that got tokens

    def begins(self, event: _Event, changes: set[str]) -> bool:
        if "pooled" in changes:
            return True  # one vector for the whole sequence
        if "tokens" in changes:
            if self._is_ahead or event.name in self._given:
                return True  # the same tokens go to an encoder and to a decoder
            self._given.add(event.name)
        is_early = "early" in changes
        if is_early and not self._is_ahead and self._has_one_way:
            return True  # the change comes from the last state of a recurrent encoder
        is_within = any(one.is_mixed for one in self._open)
        if is_within and "late" in changes and not is_early:
            return True  # a decoder layer, with its own sequence and the encoder's
        if self._open:
            self._open[-1].has_inner = True
        self._open.append(_Open(changes))
        self._is_ahead |= is_early
        return False

    def ends(self, event: _Event, changes: set[str]) -> bool:
        one = self._open.pop()
        is_early = "early" in changes
        if is_early and one.is_clean and not self.layer[1]:
            self.layer = event.name, event.kind
        self._has_one_way |= event.is_one_way and not is_early
        self._is_ahead |= is_early
        return one.is_mixed and not one.has_inner


def _is_number(tensor: Any) -> bool:
    return bool(tensor.is_floating_point())
