"""All wrappers around a function, as one stack in a given order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any
from weakref import WeakSet

from flatout import unhooked
from flatout.hooks import item_slot

ORDER = (
    ("ablation", "leaves out what the others would time"),
    ("recording", "keeps what the script hands over, in no lane's time"),
    ("observe", "times what runs, with the work of the cures"),
    ("cures", "change what runs"),
)
"""Kinds of wrappers with their purpose, outermost first. Of one kind, later ones are outside."""

_RANKS = {kind: rank for rank, (kind, _) in enumerate(reversed(ORDER))}

_stacks: WeakSet[_Stack] = WeakSet()


@dataclass(eq=False)
class Hook:
    """One wrapper in a stack."""

    stack: _Stack
    rank: int
    around: Callable[[Any], Any]

    def remove(self) -> bool:
        """Remove the wrapper; return False if another package has wrapped the function since."""
        if self not in self.stack.hooks or not self.stack.is_in_place():
            return False
        self.stack.hooks.remove(self)
        self.stack.build()
        return True

    def remake(self) -> None:
        """Make the wrapper again, unless another package has wrapped the function since."""
        if self in self.stack.hooks and self.stack.is_in_place():
            self.stack.build()


class _Stack:
    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        self.hooks: list[Hook] = []
        self._is_own = name in vars(owner)
        self._plain = vars(owner).get(name)
        self._outermost: Any = None
        is_item = name == "__getitem__" and isinstance(owner, type)
        self._is_no_sequence = is_item and not item_slot.is_sequence(owner)
        _stacks.add(self)

    def is_in_place(self) -> bool:
        return vars(self.owner).get(self.name) is self._outermost

    def build(self) -> None:
        call = self._plain if self._is_own else getattr(super(self.owner, self.owner), self.name)
        for hook in self.hooks:
            call = update_wrapper(hook.around(call), call)
        if self.hooks or self._is_own:
            setattr(self.owner, self.name, call)
        else:
            delattr(self.owner, self.name)
        if self._is_no_sequence and item_slot.can_clear():
            item_slot.clear(self.owner)
        self._outermost = call
        if self.hooks:
            call._flatout_stack = self
        for other in list(_stacks):
            is_above = isinstance(other.owner, type) and self.owner in other.owner.__mro__[1:]
            inherits = is_above and other.name == self.name and not other._is_own
            if inherits and other.hooks and other.is_in_place():
                other.build()


@contextmanager
def _without_hooks() -> Iterator[None]:
    stacks = [stack for stack in list(_stacks) if stack.hooks and stack.is_in_place()]
    kept = [(stack, stack.hooks) for stack in stacks]
    try:
        for stack in stacks:
            stack.hooks = []
            stack.build()
        yield
    finally:
        for stack, hooks in kept:
            stack.hooks = hooks
            stack.build()


unhooked.register(_without_hooks)


def wrap(owner: Any, name: str, kind: str, around: Callable[..., Any], *args: Any) -> Hook:
    """Put a wrapper around `owner.name`, at the place of its kind in ORDER.

    Args:
        owner: a module or a class.
        name: the name of a function or method in it; an inherited method is wrapped for this class
            only.
        kind: one of those in ORDER.
        around: `around(inner, *args)` returns the wrapper of `inner`. It is called again whenever
            `inner` has changed.
        *args: further arguments of `around`.
    """
    stack: Any = getattr(vars(owner).get(name), "_flatout_stack", None)
    # Another package's wrapper, or the same function elsewhere, may have a copy of the attribute.
    is_here = stack is not None and stack.owner is owner and stack.name == name
    if not is_here or not stack.is_in_place():
        stack = _Stack(owner, name)
    hook = Hook(stack, _RANKS[kind], lambda inner: around(inner, *args))
    stack.hooks.append(hook)
    stack.hooks.sort(key=lambda hook: hook.rank)
    stack.build()
    return hook
