"""Identification of the calls in runs of a model's forward, and redirection of calls to a `Run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from flatout.models.frozen.stand_in import Run
from flatout.models.keras.layers import is_layer
from flatout.models.rewrites import forward_as_written

Path = tuple[str, ...]
"""The calls of the containers around a call, from the outermost."""


class Key(NamedTuple):
    """Identifies a call of a forward, even if a run leaves out other calls.

    Attributes:
        path: the calls of the containers around the call, from the outermost.
        name: the module's name in the model, or a function's name after a colon.
        nth: number of earlier calls of this name in the same container.
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
        count = self.counts[name]
        self.counts[name] += 1
        return Key(self.path, name, count)

    def inside(self, key: Key) -> Frame:
        return Frame((*self.path, f"{key.name}#{key.nth}"))


def is_transparent(part: Any) -> bool:
    """Return whether a module is a plain Sequential.

    Calls inside a Sequential count as calls of the container around it, because a rewrite moves the
    calls to this container.
    """
    return type(part) is nn.Sequential


@contextmanager
def taking_part(run: Run, parts: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Redirect the calls of these modules to `run` within this context."""
    kept = []
    for name, part in parts:
        attribute = "call" if is_layer(part) else "forward"
        own = vars(part)
        kept.append((own, attribute, own.get(attribute, _NONE)))
        written = forward_as_written(part) if run.as_written else None
        own[attribute] = _asking(run, name, getattr(part, attribute), written)
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
    def asked(*args: Any, **kwargs: Any) -> Any:
        return run.module(name, call, written or call, args, kwargs)

    return asked
