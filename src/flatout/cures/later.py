"""A number that is fetched when it is first used."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

# Deepest nesting of sums and products of numbers that are not fetched yet.
_DEEPEST = 64


class DeferredNumber:
    """A float, int or bool that is not fetched yet. Sums and products of it are deferred too.

    Any other use waits for the number, such as comparing, printing or converting. For isinstance it
    has the type of the fetched number.
    """

    __slots__ = ("_depth", "_fetch", "_is_here", "_kind", "_value")

    def __init__(
        self,
        fetch: Callable[[], Any],
        is_here: Callable[[], bool],
        kind: type,
        depth: int = 0,
    ) -> None:
        self._fetch: Callable[[], Any] | None = fetch
        self._is_here: Callable[[], bool] | None = is_here
        self._kind = kind
        self._depth = depth
        self._value: Any = None

    @property
    def value(self) -> Any:
        """The number, after waiting for it."""
        if self._fetch is not None:
            self._value = self._fetch()
            self._fetch = self._is_here = None
        return self._value

    def is_known(self) -> bool:
        """Return True if the number is available without a wait."""
        return self._fetch is None or self._is_here is None or self._is_here()

    @property
    def __class__(self) -> type:
        return self._kind

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError("a number keeps its type")

    def __reduce__(self) -> Any:
        return self._kind, (self.value,)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy as np

        return np.array(self.value, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __neg__(self) -> Any:
        return _combined("mul", self, -1)

    def __abs__(self) -> Any:
        return abs(self.value)

    def __round__(self, *digits: int) -> Any:
        return round(self.value, *digits)


def _known(value: Any) -> Any:
    return value.value if type(value) is DeferredNumber else value


def _combined(name: str, a: Any, b: Any) -> Any:
    apply = getattr(operator, name)
    waiting = [x for x in (a, b) if type(x) is DeferredNumber and not x.is_known()]
    depth = 1 + max((x._depth for x in waiting), default=0)
    # A division by zero has to raise on the line that divides, so the divisor is fetched at once.
    is_at_once = name == "truediv" and (type(b) is DeferredNumber or not b)
    are_numbers = all(type(x) in (int, float, bool, DeferredNumber) for x in (a, b))
    if not waiting or depth > _DEEPEST or is_at_once or not are_numbers:
        return apply(_known(a), _known(b))
    kind = type(apply(_one_like(a), _one_like(b)))
    return DeferredNumber(
        lambda: apply(_known(a), _known(b)), lambda: all(x.is_known() for x in waiting), kind, depth
    )


def _one_like(value: Any) -> Any:
    return value._kind(1) if type(value) is DeferredNumber else type(value)(1)


def _lazy(name: str) -> None:
    setattr(DeferredNumber, f"__{name}__", lambda self, other: _combined(name, self, other))
    setattr(DeferredNumber, f"__r{name}__", lambda self, other: _combined(name, other, self))


def _strict(name: str) -> None:
    apply = getattr(operator, name)
    setattr(DeferredNumber, f"__{name}__", lambda self, other: apply(self.value, _known(other)))
    setattr(DeferredNumber, f"__r{name}__", lambda self, other: apply(_known(other), self.value))


for _name in ("add", "sub", "mul", "truediv"):
    _lazy(_name)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "pow", "mod", "floordiv"):
    _strict(_name)
