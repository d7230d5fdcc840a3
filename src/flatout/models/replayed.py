"""How a forward makes tensors of a batch, so that they can be made of another batch without it.

The calls of torch's functions are recorded while it runs. What a tensor was made by is then called
with the tensors of the other batch. That is a guess: Python code between the calls is not seen. So
such a tensor is compared with the one that the forward makes itself before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode


class _Call(NamedTuple):
    """A call of a function of torch's, and what it gave."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: Any


class _Of(NamedTuple):
    """In the place of a tensor: which input it is, or which part of what a call gives."""

    call: int | None
    place: int | None


class InputRecording(TorchFunctionMode):
    """Within, records what is computed of inputs without a gradient.

    Args:
        inputs: of the forward.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._of = {id(tensor): _Of(None, place) for place, tensor in enumerate(inputs)}
        self._inputs = inputs  # as long as they live no other tensor has their id

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        read = list(_tensors((args, kwargs)))
        if any(tensor.requires_grad for tensor in read):
            return func(*args, **kwargs)
        before = [_version(tensor) for tensor in read]
        drawn = torch.get_rng_state()
        given = func(*args, **kwargs)
        # What writes or draws random numbers is not to be done twice.
        is_pure = before == [_version(tensor) for tensor in read] and "out" not in kwargs
        if is_pure and torch.equal(drawn, torch.get_rng_state()):
            self._note(_Call(func, args, kwargs, given))
        return given

    def _note(self, call: _Call) -> None:
        number = len(self._calls)
        if torch.is_tensor(call.given):
            parts: list[tuple[int | None, Any]] = [(None, call.given)]
        elif isinstance(call.given, (tuple, list)):
            parts = list(enumerate(call.given))
        else:
            return
        made = [(place, part) for place, part in parts if torch.is_tensor(part)]
        if any(part.requires_grad for _, part in made):
            return
        self._calls.append(call)
        for place, part in made:
            self._of.setdefault(id(part), _Of(number, place))

    def of(self, wanted: Sequence[torch.Tensor]) -> Replayed:
        """What makes these tensors of a batch."""
        places = [self._of.get(id(tensor), tensor) for tensor in wanted]
        needed: set[int] = set()
        left = [place.call for place in places if isinstance(place, _Of)]
        while left:
            number = left.pop()
            if number is not None and number not in needed:
                needed.add(number)
                call = self._calls[number]
                result = (self._of.get(id(tensor)) for tensor in _tensors((call.args, call.kwargs)))
                left += [item.call for item in result if item is not None]
        calls = {number: self._in_places(self._calls[number]) for number in sorted(needed)}
        return Replayed(calls, places)

    def _in_places(self, call: _Call) -> _Call:
        def placed(value: Any) -> Any:
            if torch.is_tensor(value):
                return self._of.get(id(value), value)
            if type(value) in (tuple, list):
                return type(value)(map(placed, value))
            if type(value) is dict:
                return {name: placed(item) for name, item in value.items()}
            return value

        return _Call(call.function, placed(call.args), placed(call.kwargs), None)


class Replayed:
    """Makes tensors of inputs by calls that were recorded.

    Args:
        calls: by number, in their order.
        wanted: what to give: of what call, or a tensor that no input has gone into.
    """

    def __init__(self, calls: dict[int, _Call], wanted: Sequence[Any]) -> None:
        self._calls, self._wanted = calls, wanted

    @torch.no_grad()
    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, made of other inputs; may raise what the functions raise."""
        made: dict[int, Any] = {}

        def filled(value: Any) -> Any:
            if isinstance(value, _Of):
                if value.call is None:
                    assert value.place is not None
                    return inputs[value.place]
                given = made[value.call]
                return given if value.place is None else given[value.place]
            if type(value) in (tuple, list):
                return type(value)(map(filled, value))
            if type(value) is dict:
                return {name: filled(item) for name, item in value.items()}
            return value

        for number, call in self._calls.items():
            made[number] = call.function(*filled(call.args), **filled(call.kwargs))
        return [filled(item) for item in self._wanted]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(values):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
