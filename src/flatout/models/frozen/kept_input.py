"""What a loop of one's own is given for inputs whose features are kept: tensors that are made late.

A model on which a cut was put takes them as its features. Everything else that reads one reads the
inputs themselves, which are made then where they are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map

from flatout.data import Features, map_tensors, tensors_in
from flatout.models.frozen.stand_in import name_of

# They read the form of a tensor, which is known.
_ABOUT = frozenset(
    """
    shape dtype device ndim layout is_cuda is_cpu is_meta size dim numel nelement ndimension
    is_floating_point is_complex element_size itemsize nbytes __len__ get_device
    """.split()  # noqa: SIM905
)
_PLACES = frozenset(["to", "cpu", "cuda", "float", "half", "bfloat16", "double"])


class KeptInputs:
    """The inputs of a batch, and what its frozen layers give.

    Args:
        features: of the samples.
        template: inputs of any number of samples, of the same structure, shapes and dtypes.
        made: the inputs where they are there; None where `make` gives them.
        make: gives the inputs.
        autocast: in which the features were computed, as `autocast_now` tells it.

    Attributes:
        given: the inputs as the loop gets them.
        was_served: whether a model took the features.
        was_read: whether anything else has read the inputs.
    """

    def __init__(
        self,
        features: Features,
        template: Any,
        made: Any,
        make: Callable[[], Any],
        autocast: Any,
    ) -> None:
        self.features = features
        self.was_served = self.was_read = False
        self._made = None if made is None else tensors_in(made)
        self._versions = [item._version for item in self._made or ()]
        self._make, self._autocast = make, autocast
        count = len(features[0])
        forms = iter(enumerate(tensors_in(template)))
        self.given = map_tensors(lambda _: KeptInput.of(self, *next(forms), 0, count), template)
        self._call = tree_flatten(_arguments(self.given))[1]

    def read(self, number: int) -> torch.Tensor:
        """One of the tensors."""
        self.was_read = True
        if self._made is None:
            self._made = tensors_in(self._make())
            self._versions = [item._version for item in self._made]
        return self._made[number]

    def fits(self, leaves: Sequence[KeptInput], call: Any) -> bool:
        """Whether these arguments are the inputs as they were, in their order and autocast."""
        made = self._made or ()
        return (
            call == self._call
            and [leaf.number for leaf in leaves] == list(range(len(leaves)))
            and [item._version for item in made] == self._versions
            and not any(item.requires_grad for item in made)
            and self._autocast == autocast_now(self.features[0].device.type)
        )


class KeptInput(torch.Tensor):
    """One tensor of `KeptInputs`, or some of its rows."""

    owner: KeptInputs
    number: int
    rows: tuple[int, int]

    @classmethod
    def of(
        cls, owner: KeptInputs, number: int, like: torch.Tensor, start: int, stop: int
    ) -> KeptInput:
        """Rows `start` to `stop` of a tensor."""
        shape = (stop - start, *tuple(like.shape)[1:])
        made: KeptInput = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device
        )
        made.owner, made.number, made.rows = owner, number, (start, stop)
        return made

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, own = name_of(func), args[0] if args else None
        if isinstance(own, KeptInput):
            with torch._C.DisableTorchFunctionSubclass():
                if name in _ABOUT:
                    return func(*args, **kwargs or {})
                if name in _PLACES and own._is_there(func, args[1:], kwargs or {}):
                    return own
                if name == "__getitem__" and _is_of_rows(args[1]):
                    start, stop, _ = args[1].indices(len(own))
                    at = own.rows[0]
                    return cls.of(own.owner, own.number, own, at + start, at + max(start, stop))
        return func(*inputs_of(args), **inputs_of(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*inputs_of(args), **inputs_of(kwargs or {}))

    def _is_there(self, func: Any, args: Any, kwargs: Any) -> bool:
        if "memory_format" in kwargs:
            return False
        none = torch.empty((0,), dtype=self.dtype, device=self.device)
        return func(none, *inputs_of(args), **inputs_of(kwargs)) is none


def _is_of_rows(at: Any) -> bool:
    return isinstance(at, slice) and at.step in (None, 1)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence):
        return tuple(inputs), {}
    return (inputs,), {}


def autocast_now(device: str) -> tuple[bool, torch.dtype]:
    """Whether autocast is on for a kind of device, and its dtype."""
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def inputs_of(value: Any) -> Any:
    """The same with the inputs themselves in place of what stands for them."""
    return tree_map(_input_of, value)


def _input_of(leaf: Any) -> Any:
    if not isinstance(leaf, KeptInput):
        return leaf
    whole, (start, stop) = leaf.owner.read(leaf.number), leaf.rows
    return whole if (start, stop) == (0, len(whole)) else whole[start:stop]


def features_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Features | None:
    """The features of the inputs that a model is called with; None where there are none."""
    leaves, call = tree_flatten((args, kwargs))
    if not leaves or not all(isinstance(leaf, KeptInput) for leaf in leaves):
        return None
    owner, rows = leaves[0].owner, leaves[0].rows
    if any(leaf.owner is not owner or leaf.rows != rows for leaf in leaves):
        return None
    if not owner.fits(leaves, call):
        return None
    owner.was_served = True
    return Features(part[rows[0] : rows[1]] for part in owner.features)


def is_called_with(inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether these arguments are a batch's inputs, or rows of them, as a model takes them."""
    own, spec = tree_flatten(_arguments(inputs))
    leaves, call = tree_flatten((args, kwargs))
    return spec == call and all(
        torch.is_tensor(leaf)
        and leaf.dtype == item.dtype
        and leaf.shape[1:] == item.shape[1:]
        and leaf.untyped_storage().data_ptr() == item.untyped_storage().data_ptr()
        for leaf, item in zip(leaves, own, strict=True)
    )
