"""The slot by which C code recognizes a class as a sequence.

CPython fills it when a class gets a `__getitem__`, and leaves it filled when that is removed
(`update_slot` in Objects/typeobject.c). A tensor has a `__getitem__` and no such slot. With the
slot, `torch.tensor([a, b])` of two scalars asks them for their length and fails.
"""

from __future__ import annotations

import ctypes
from functools import cache

# The number of `sq_item` in Include/typeslots.h.
_SQ_ITEM = 44
# _AS_SEQUENCE: number of pointers before `tp_as_sequence` in a type, after its header and size.
# _ITEM: number of pointers before `sq_item`.
_AS_SEQUENCE, _ITEM = 10, 3
_POINTER = ctypes.sizeof(ctypes.c_void_p)


def is_sequence(owner: type) -> bool:
    return _slot(owner) is not None


@cache
def can_clear() -> bool:
    """Return whether the slot is at the expected place in this Python."""

    class Known:
        def __getitem__(self, number: int) -> int:
            return number

    known = _slot(Known)
    return known is not None and _place(Known).value == known


def clear(owner: type) -> None:
    if is_sequence(owner):
        _place(owner).value = None
    heirs: list[type] = type.__subclasses__(owner)
    for heir in heirs:
        if getattr(heir, "__getitem__", None) is getattr(owner, "__getitem__", None):
            clear(heir)


def _slot(owner: type) -> int | None:
    get = ctypes.pythonapi.PyType_GetSlot
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]
    found: int | None = get(owner, _SQ_ITEM)
    return found


def _place(owner: type) -> ctypes.c_void_p:
    header = object.__basicsize__ + _POINTER
    methods = ctypes.c_void_p.from_address(id(owner) + header + _AS_SEQUENCE * _POINTER).value
    assert methods is not None  # a class in Python code has one
    return ctypes.c_void_p.from_address(methods + _ITEM * _POINTER)
