"""Calls of the outermost modules: found among all calls at first, then by their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.hooks.compiling import is_anything_compiled
from flatout.hooks.wrapping import Hook, wrap

SEARCH_STEPS = 3
"""Optimizer steps after which the outermost modules that it trains are known."""


class ModuleCalls:
    """Wraps the calls of all modules, then those of some classes only.

    Wrapping the calls of all modules costs a third of a microsecond for each submodule and call.

    Args:
        kind, around: as for `wrap`.
        hooked: called with each Hook.

    Attributes:
        classes: classes whose calls are wrapped.
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
        """Wrap the calls of this class."""
        hook = wrap(owner, "__call__", self._kind, self._around)
        self._hooked(hook)
        return hook

    def search(self) -> None:
        """Wrap the calls of all modules."""
        if self._of_all is None:
            self._of_all = self.watch(self._module)

    def end(self) -> None:
        """Remove the wrapper of all modules."""
        if self._of_all is not None:
            self._of_all.remove()

    def narrow(self, classes: set[Any]) -> bool:
        """Wrap the calls of only these classes; if impossible, change nothing and return False."""
        if is_anything_compiled():
            return False  # compiled code would be compiled again
        if self._of_all is None or not self._of_all.remove():
            return False
        self._of_all = None
        for owner in classes - self.classes - {self._module}:
            self.watch(owner)
        self.classes |= classes
        return True
