"""Detection of changes to objects since workers got a copy of them."""

from __future__ import annotations

from typing import Any

# _DEPTH: levels of held objects that are compared. _MOST: maximum number of attributes that are
# compared.
_DEPTH, _MOST = 4, 10_000
_PLAIN = (bool, int, float, str, bytes, type(None))


class Attributes:
    """The attributes of some objects, and of the objects in them, at one moment.

    Objects are compared by identity, tensors also by their version. Changes inside numpy arrays and
    other containers are not detected.
    """

    def __init__(self, *objects: Any) -> None:
        self._before = _all_of(objects)

    def changed(self, *objects: Any) -> str:
        """Return the first attribute that has changed, or ""."""
        now = _all_of(objects)
        for name in {**self._before, **now}:
            if name not in now or name not in self._before:
                return name
            if not _same(self._before[name], now[name]):
                return name
        return ""


def _all_of(objects: tuple[Any, ...]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for item in objects:
        name = type(item).__name__
        _collect(item, name, result, _DEPTH)
        result[name] = (id(item), *result[name][1:])  # the result does not keep the object alive
    return result


def _collect(item: Any, name: str, result: dict[str, Any], depth: int) -> None:
    if len(result) >= _MOST:
        return
    version = getattr(item, "_version", None) if hasattr(type(item), "_version") else None
    size = len(item) if isinstance(item, (list, dict, set)) else None
    result[name] = (item, version if isinstance(version, int) else None, size)
    inner = getattr(item, "__dict__", None)
    if depth and isinstance(inner, dict) and not isinstance(item, type) and version is None:
        for attribute, value in inner.items():
            _collect(value, f"{name}.{attribute}", result, depth - 1)
    if depth and isinstance(item, (list, tuple)) and len(item) <= 64:
        for at, value in enumerate(item):
            if not isinstance(value, _PLAIN):
                _collect(value, f"{name}[{at}]", result, depth - 1)


def _same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if before[1:] != now[1:]:
        return False
    if isinstance(before[0], _PLAIN) and type(before[0]) is type(now[0]):
        return bool(before[0] == now[0])
    return before[0] is now[0]
