"""Inspection of backward passes after the first steps of a training.

In the first steps, the hook of backward.py inspects them, before a hook in C replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from flatout.hooks import Hook, is_anything_compiled, wrap
from flatout.observe.watch import Watch


class LaterBackwards:
    """Hook that inspects the losses of backward passes while it is open."""

    def __init__(self, torch: Any, watch: Watch, look: Callable[[Any], None]) -> None:
        self._torch = torch
        self._watch = watch
        self._look = look
        self._hook: Hook | None = None

    def open(self) -> None:
        """Inspect further backward passes, unless the hook would make something compile again."""
        if self._hook is None and not is_anything_compiled():
            self._hook = wrap(self._torch.autograd, "backward", "observe", self._looking)

    def close(self) -> None:
        """Stop the inspection."""
        if self._hook is not None and self._hook.remove():
            self._hook = None

    def _looking(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not self._watch.is_beginning and self._watch.lanes.thread == get_ident():
                self._watch.aside(lambda: self._look(tensors), is_once=True)
            original(tensors, *args, **kwargs)

        return backward
