"""Calls of the outermost modules: found among all calls at first, then by their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.hooks.compiling import is_anything_compiled
from flatout.hooks.wrapping import Hook, wrap

SEARCH_STEPS = 3
"""After so many steps of an optimizer the outermost modules that it trains are known."""


class ModuleCalls:
    """Wraps the calls of all modules, then those of some classes alone.

    Wrapping those of all costs a third of a microsecond for each submodule and call.

    Args:
        torch: the module.
        kind, around: as `wrap` takes them.
        hooked: gets each Hook.

    Attributes:
        classes: those whose calls are wrapped.
    """

    def __init__(
        self,
        torch: Any,
        kind: str,
        around: Callable[[Any], Any],
        hooked: Callable[[Hook], None] = lambda hook: None,
    ) -> None:
        self.classes: set[Any] = set()
        self._module = torch.nn.Module
        self._kind, self._around, self._hooked = kind, around, hooked
        self._of_all: Hook | None = None

    def watch(self, owner: Any) -> Hook:
        """Wraps the calls of this class."""
        hook = wrap(owner, "__call__", self._kind, self._around)
        self._hooked(hook)
        return hook

    def search(self) -> None:
        """Wraps those of all modules."""
        if self._of_all is None:
            self._of_all = self.watch(self._module)

    def end(self) -> None:
        """Remove the wrapper of all modules."""
        if self._of_all is not None:
            self._of_all.remove()

    def narrow(self, classes: set[Any]) -> bool:
        """Wraps those of these classes alone; returns False, and leaves all, where it cannot."""
        if is_anything_compiled():
            return False  # something is compiled, and would be compiled again
        if self._of_all is None or not self._of_all.remove():
            return False
        self._of_all = None
        for owner in classes - self.classes - {self._module}:
            self.watch(owner)
        self.classes |= classes
        return True
