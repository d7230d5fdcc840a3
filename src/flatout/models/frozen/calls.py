"""Whose calls a run through a model's forward takes part in."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from flatout.models.frozen.stand_in import Run

Path = tuple[str, ...]
"""The calls of containers that a call stands in, from the outermost."""


class Key(NamedTuple):
    """Which call of a forward: the same in each run, however much of the rest is left out.

    Attributes:
        path: the containers around.
        name: the module's in the model, or the function's after a colon.
        nth: how many of this name there were before in the same container.
    """

    path: Path
    name: str
    nth: int


class Frame:
    """One call of a container, while it runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()

    def key(self, name: str) -> Key:
        """Of the next call of this name."""
        count = self.counts[name]
        self.counts[name] += 1
        return Key(self.path, name, count)

    def inside(self, key: Key) -> Frame:
        """That of a container that is called here."""
        return Frame((*self.path, f"{key.name}#{key.nth}"))


def is_keras(model: nn.Module) -> bool:
    """Whether Keras made it, whose layers are called past torch."""
    kind = getattr(sys.modules.get("keras"), "Model", None)
    return kind is not None and isinstance(model, kind)


def parts_of(model: Any) -> dict[str, Any]:
    """Each part whose calls can be told apart, by its name; not the model itself."""
    if not is_keras(model):
        return {name: part for name, part in model.named_modules() if part is not model}
    named: dict[str, Any] = {}
    for layer in model._flatten_layers(include_self=False):
        name = layer.name
        while name in named:
            name += "+"
        named[name] = layer
    return named


def is_transparent(part: Any) -> bool:
    """A plain Sequential: what stands in it stands in what is around, for a rewrite calls that."""
    return type(part) is nn.Sequential


@contextmanager
def taking_part(run: Run, parts: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Within, the calls of these parts ask the run."""
    kept = []
    for name, part in parts:
        attribute = "forward" if hasattr(type(part), "_call_impl") else "call"
        attribute = "call" if hasattr(part, "_flatten_layers") else attribute
        own = vars(part)
        kept.append((own, attribute, own.get(attribute, _NONE)))
        own[attribute] = _asking(
            run, name, getattr(part, attribute), written_of(part, run.as_written)
        )
    try:
        yield
    finally:
        for own, attribute, before in reversed(kept):
            if before is _NONE:
                own.pop(attribute, None)
            else:
                own[attribute] = before


_NONE = object()


def _asking(
    run: Run, name: str, call: Callable[..., Any], written: Callable[..., Any] | None
) -> Callable[..., Any]:
    """A part's call, which asks the run what to do."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        return run.module(name, call, written or call, args, kwargs)

    return asked


def written_of(part: Any, as_written: bool) -> Callable[..., Any] | None:
    """The forward of its class where a rewrite of ours is on the part; None where none is.

    A rewrite makes calls in another order, and only in training: a part that is cut runs as it is
    written, so that it is cut in the same place whatever is rewritten meanwhile.
    """
    own = vars(part).get("forward")
    return MethodType(type(part).forward, part) if as_written and is_ours(own) else None


def is_ours(forward: Any) -> bool:
    """Whether a module's own forward is a rewrite, or takes part in a run."""
    return str(getattr(forward, "__module__", "")).startswith("flatout.models.")


def call_with(model: Any, inputs: Any, call: Callable[..., Any] | None = None) -> Any:
    """The model's outputs for a batch's inputs: a tensor, a tuple, or a mapping by argument."""
    call = call or model
    if is_keras(model):
        training = {"training": model.training} if model._call_has_training_arg else {}
        return call(inputs, **training)
    if torch.is_tensor(inputs):
        return call(inputs)
    return call(**inputs) if isinstance(inputs, Mapping) else call(*inputs)
