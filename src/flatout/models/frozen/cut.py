"""A forward in two parts: the frozen prefix, from inputs to kept values, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from types import MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from flatout.data import Features
from flatout.errors import ModelError
from flatout.models.adapter import adapter_of
from flatout.models.applied_cut import applied
from flatout.models.frozen.calls import Frame, is_transparent, taking_part
from flatout.models.frozen.contents import Contents
from flatout.models.frozen.form import Form
from flatout.models.frozen.plan import Plan, Step
from flatout.models.frozen.recording import OutputStructure, is_same, nothing_random
from flatout.models.frozen.stand_in import StandIn, about, name_of, stand_ins, with_values
from flatout.models.rewrites import is_ours

_ACTING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
_PLAIN = (bool, int, float, str)
# When attributes of modules around the frozen part change, the prefix is checked on a few samples.
# _TRIED: number of first changes after each of which the prefix is checked. _TRIED_EVERY: number of
# changes between two later checks.
_TRIED, _TRIED_EVERY = 4, 64


def _is_option(name: str, value: Any) -> bool:
    return name != "training" and type(value) in _PLAIN


def _attributes_of(parts: Iterable[nn.Module]) -> list[tuple[dict[str, Any], list[str]]]:
    return [
        (vars(part), [name for name, value in vars(part).items() if _is_option(name, value)])
        for part in parts
        if not type(part).__module__.startswith("torch.")
    ]


def _children_of(
    inside: Collection[nn.Module], around: Iterable[nn.Module]
) -> list[tuple[dict[str, Any], str]]:
    own = set(map(id, inside))
    result = [(part._modules, name) for part in inside for name, _ in part._modules.items()]
    for part in around:
        for name, child in part._modules.items():
            if child is not None and not own.isdisjoint(map(id, child.modules())):
                result.append((part._modules, name))
    # A ScriptModule does not hold parameters and buffers in a dict, and cannot replace them.
    return [(children, name) for children, name in result if isinstance(children, dict)]


def autocast_now(device: str) -> tuple[bool, torch.dtype]:
    """Return whether autocast is on for a kind of device, and its dtype."""
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


class _Enough(BaseException):
    """Ends a forward when all kept values exist. User code should not catch it: it is no error."""


class _Part:
    """A run of a forward that computes only a part of it."""

    def __init__(
        self,
        plan: Plan,
        as_written: bool,
        forms: dict[int, Form],
        samples: int,
        values: dict[int, torch.Tensor],
    ) -> None:
        self.plan = plan
        self.as_written = as_written
        self._forms = forms
        self._samples = samples
        self._frame = Frame(())
        self._inside = 0  # number of active calls of modules that run whole
        self.values = values

    def stand_in(self, number: int) -> StandIn:
        value = self.values.get(number)
        if value is not None:
            return StandIn.of(self, number, value)
        form = self._forms[number]
        return StandIn.blank(self, number, form.shape(self._samples), form.strides, form)

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(function)
        answer = about(name, function, args, kwargs)
        if answer is not NotImplemented:
            return answer
        return self._take(self.plan.steps.get(self._frame.key(f":{name}")), function, args, kwargs)

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
        key = self._frame.key(name)
        step = self.plan.steps.get(key)
        if step is None or step.kind != "enter":
            self._inside += 1
            try:
                return self._take(step, call, args, kwargs)
            finally:
                self._inside -= 1
        outer = self._frame
        if not is_transparent(self.plan.parts[name]):
            self._frame = outer.inside(key)
        try:
            return written(*args, **kwargs)
        finally:
            self._frame = outer

    def _take(
        self, step: Step | None, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if step is not None and step.kind == "give":
            return self._given(step, args, kwargs)
        real = with_values((args, kwargs))
        result = call(*real[0], **real[1])
        return result if step is None else self._noted(step, result, args, kwargs)

    def _given(self, step: Step, args: Any, kwargs: Any) -> Any:
        written = self._write(step, args, kwargs)
        if step.given is None:
            return None
        leaves = [
            (written[leaf] if leaf in written else self.stand_in(leaf)) if is_value else leaf
            for is_value, leaf in step.given.leaves
        ]
        return step.given.spec.unflatten(leaves)

    def _noted(self, step: Step, result: Any, args: Any, kwargs: Any) -> Any:
        given = list(stand_ins((args, kwargs)))
        for place, number in step.writes:
            value = given[place].value
            assert value is not None
            self.values[number] = value
        if step.given is not None:
            leaves = step.given.spec.flatten_up_to(result)
            for (is_value, number), leaf in zip(step.given.leaves, leaves, strict=True):
                if is_value:
                    self.values[number] = leaf
        if step.is_last:
            raise _Enough
        return self._given(step, args, kwargs)

    def _write(self, step: Step, args: Any, kwargs: Any) -> dict[int, StandIn]:
        given = list(stand_ins((args, kwargs))) if step.writes else []
        for place, number in step.writes:
            given[place].number = number
            given[place].value = self.values.get(number)
        return {number: given[place] for place, number in step.writes}


class _Remembered(NamedTuple):
    """The prefix's results for a few samples.

    Attributes:
        inputs: the model's inputs.
        features: the kept values of these inputs.
        autocast: the autocast state of that run (see `autocast_now`).
    """

    inputs: Any
    features: Sequence[torch.Tensor]
    autocast: tuple[bool, torch.dtype]


class Cut:
    """A place in a model's forward; everything before it is frozen.

    Attributes:
        name: description of the place, in words.
        tensors: parameters and buffers that the prefix reads, by name in the model.
        bytes_per_sample: bytes of a sample's kept values.
        place: indices, in the order of the forward, of the calls before the cut.
        calls: digest of the prefix's calls, which distinguishes prefixes with the same tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        tensors: dict[str, torch.Tensor],
        kept: list[int],
        forms: dict[int, Form],
        inputs: OutputStructure,
        plans: tuple[Plan, Plan],
        modules: list[nn.Module],
        *,
        as_written: bool,
        place: list[int],
        calls: str,
        around: list[nn.Module],
    ) -> None:
        self._model = ref(model)
        self.place, self.calls = place, calls
        self.name = name
        self.tensors = tensors
        self._kept = kept
        self._forms = forms
        self._inputs = inputs
        self._before, self._behind = plans
        self._as_written = as_written
        own = {id(part): part for module in modules for part in module.modules()}
        self._modules = list(own.values())
        self._attributes = _attributes_of(self._modules)
        self._children = _children_of(self._modules, around)
        # Changes of these attributes may concern only the part after the cut.
        self._around = _attributes_of([part for part in around if id(part) not in own])
        self._could_act = [part for part in self._modules if not part.training]
        self._around_was = self._around_now()
        self._changes = 0
        self._remembered: _Remembered | None = None
        read = {id(tensor) for tensor in tensors.values()}
        self._places = [
            (owner, name)
            for part in {id(part): part for part in (*model.modules(), *self._modules)}.values()
            for owner in (part._parameters, part._buffers, vars(part))
            for name, tensor in owner.items()
            if torch.is_tensor(tensor) and id(tensor) in read
        ]
        placed = {id(owner[name]) for owner, name in self._places}
        self._others = [tensor for tensor in tensors.values() if id(tensor) not in placed]
        self._state = self._state_now()
        self._contents: Contents | None = None

    def __repr__(self) -> str:
        return f"Cut({self.name!r})"

    @property
    def model(self) -> nn.Module:
        """The model that is cut."""
        model = self._model()
        assert model is not None
        return model

    @property
    def modules(self) -> list[nn.Module]:
        """All modules that run completely before the cut, and the modules in them."""
        return self._modules

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of a sample's kept values."""
        return sum(self._forms[number].bytes_per_sample for number in self._kept)

    def prefix(self, inputs: Any) -> Features:
        """Return the kept values of a batch, computed without gradients in the caller's autocast.

        Args:
            inputs: the model's inputs.

        Raises:
            ModelError: the model's forward has changed since it was cut.
        """
        leaves = self._inputs.spec.flatten_up_to(inputs)
        numbers = [number if is_value else None for is_value, number in self._inputs.leaves]
        values = {n: leaf for n, leaf in zip(numbers, leaves, strict=True) if n is not None}
        first = next(iter(values))
        axis = self._forms[first].axis
        samples = values[first].shape[axis or 0]
        run = _Part(self._before, self._as_written, self._forms, samples, values)
        try:
            with torch.enable_grad():
                self._run(run, inputs)
        except _Enough:
            pass
        missing = [number for number in self._kept if number not in run.values]
        if missing:
            raise self._other()
        return Features(self._forms[n].rows(run.values[n]) for n in self._kept)

    def rest(self, features: Features) -> Any:
        """Return the model's outputs, computed from the kept values.

        Raises:
            ModelError: the model's forward has changed since it was cut.
        """
        values = {
            number: self._forms[number].value(rows)
            for number, rows in zip(self._kept, features, strict=True)
        }
        run = _Part(self._behind, self._as_written, self._forms, len(features[0]), values)
        return with_values(self._run(run, None))

    def _run(self, run: _Part, inputs: Any) -> Any:
        leaves = self._inputs.spec.flatten_up_to(inputs) if inputs is not None else None
        given = [
            run.stand_in(known) if is_value else (known if leaves is None else leaves[at])
            for at, (is_value, known) in enumerate(self._inputs.leaves)
        ]
        plan = run.plan
        with taking_part(run, plan.parts.items()):
            inputs = self._inputs.spec.unflatten(given)
            return adapter_of(self.model).outputs(inputs, as_written=run.as_written)

    def _other(self) -> ModelError:
        return ModelError(
            f"{type(self.model).__name__} does not come to where it was cut ({self.name})",
            do="look for its cuts again after its forward or its settings have changed",
        )

    def remember(self, inputs: Any, features: Sequence[torch.Tensor]) -> None:
        """Remember a few inputs and the prefix's results for them in the present autocast state."""
        self._remembered = _Remembered(inputs, features, autocast_now(features[0].device.type))

    def is_current(self) -> bool:
        """Return whether the frozen part is unchanged: tensors, flags, attributes, hooks, modules.

        A module around the frozen part may change an attribute that only the part after the cut
        uses. So after such a change the prefix is run on a few samples. If attributes change in
        each step, the prefix is run rarely.
        """
        if self._state != self._state_now():
            return False
        now = self._around_now()
        if now == self._around_was:
            return True
        self._changes += 1
        is_tried = self._changes <= _TRIED or self._changes % _TRIED_EVERY == 0
        then = self._remembered
        if is_tried and (then is None or not self._gives_still(then)):
            return False
        self._around_was = now
        return True

    @property
    def contents(self) -> Contents:
        """Contents of the prefix's tensors when the cut was applied, or when this was first read.

        A comparison costs more than `is_current`, and also finds values that were written through
        `tensor.data` or an array.
        """
        self._contents = self._contents or Contents(self.tensors.values())
        return self._contents

    def _state_now(self) -> list[Any]:
        tensors = [own.get(name) for own, name in self._places]
        state: list[Any] = [
            t if t is None else (id(t), t._version, t.data_ptr(), t.requires_grad) for t in tensors
        ]
        state += [None if t.is_inference() else t._version for t in self._others]
        state += [own.get(name) for own, names in self._attributes for name in names]
        state += [id(own.get(name)) for own, name in self._children]
        for part in self._modules:
            state.append(len(part._forward_hooks) + len(part._forward_pre_hooks))
            # Only these modules act differently in training. An evaluation turns training mode off,
            # never on.
            state.append(part.training if isinstance(part, _ACTING) else None)
            forward = vars(part).get("forward")
            state.append(None if forward is None or is_ours(forward) else forward)
        return state

    def _around_now(self) -> list[Any]:
        state = [own.get(name) for own, names in self._around for name in names]
        return [*state, *(part.training for part in self._could_act)]

    def _gives_still(self, then: _Remembered) -> bool:
        is_on, dtype = then.autocast
        with (
            nothing_random(),
            torch.no_grad(),
            torch.autocast(then.features[0].device.type, dtype, enabled=is_on),
        ):
            try:
                now = self.prefix(then.inputs)
            except Exception:
                return False
        return all(map(is_same, now, then.features))

    def apply(self) -> Callable[[], None]:
        """Let the model take `Features` in place of its inputs, and return a function to undo it.

        All other calls of the model stay as they are, and so do its pickle, its copies and its
        state dict. The method replaces `_call_impl` of the instance, so rewrites may meanwhile put
        another `forward` on the model and remove it. Calls of Keras models bypass it; their caller
        reads `applied`.
        """
        model = self.model
        self._contents = self._contents or Contents(self.tensors.values())
        applied[model] = self
        own = vars(model)
        own["_call_impl"] = MethodType(_call_impl, model)

        def undo() -> None:
            if applied.get(model) is self:
                del applied[model]
                own.pop("_call_impl", None)

        return undo


# Has this name so that a copy or pickle of the model finds the method of its class again.
def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    cut = applied.get(self)
    if cut is not None and len(args) == 1 and isinstance(args[0], Features):
        return cut.rest(args[0])
    return type(self)._call_impl(self, *args, **kwargs)  # type: ignore[no-untyped-call]
