"""Where the script stands: its optimizers, their steps, and what it does in each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any
from weakref import ref

from flatout.cures.record import is_on, leave, took
from flatout.hooks import unnumbered, wrap


class ScriptSteps:
    """The script's optimizers and how often they have stepped.

    Attributes:
        count: steps so far. Where optimizers take turns, of the one that has stepped most often.
        before: called with an optimizer before it steps.
        after: called after an optimizer has stepped.
        has_closure: whether the step that is about to begin was given one, or anything else.
        generation: changes whenever an optimizer gets parameters.
        thread: the one that trains.
        asked: of the script: value by dotted name.
        of_unstepped: cures of outermost modules that no optimizer steps, such as a backbone that
            the script calls by itself.
    """

    took, leave = staticmethod(took), staticmethod(leave)

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.count = 0
        self.has_closure = False
        self.generation = 0
        self.thread = get_ident()
        self.before: list[Callable[[Any], None]] = []
        self.after: list[Callable[[], None]] = []
        self.of_unstepped: list[Callable[..., Any]] = []
        self._counts: dict[int, int] = {}
        self._optimizers: dict[int, Any] = {}
        self._owned: set[int] = set()
        self._owned_at = 0
        self._places: dict[Hashable, tuple[int, bool]] = {}

    def watch(self, torch: Any) -> None:
        """Hooks into torch.optim."""
        module = sys.modules["torch.optim.optimizer"]
        is_compiling = torch.compiler.is_compiling

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling() and get_ident() == self.thread and is_on():
                self.has_closure = any(arg is not optimizer and arg is not None for arg in args)
                self.has_closure |= any(kwarg is not None for kwarg in kwargs.values())
                for hook in self.before:
                    hook(optimizer)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling() and get_ident() == self.thread and is_on():
                count = self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
                self.count = max(self.count, count)
                for hook in self.after:
                    hook()

        self._hooks = [
            unnumbered(module.register_optimizer_step_pre_hook(before)),
            unnumbered(module.register_optimizer_step_post_hook(after)),
            wrap(module.Optimizer, "add_param_group", "cures", self._added),
        ]

    def unwatch(self) -> None:
        """Remove all hooks that `watch` has set."""
        for hook in self._hooks:
            hook.remove()

    def _added(self, original: Any) -> Any:
        def add_param_group(optimizer: Any, param_group: Any) -> Any:
            result = original(optimizer, param_group)
            self._optimizers[id(optimizer)] = ref(optimizer)
            self.generation += 1
            return result

        return add_param_group

    def optimizers(self) -> list[Any]:
        """Those that were made and are still there."""
        return [
            optimizer
            for reference in self._optimizers.values()
            if (optimizer := reference()) is not None
        ]

    def owns(self, parameters: Iterable[Any]) -> bool:
        """Whether an optimizer steps one of these parameters."""
        if self._owned_at != self.generation:
            self._owned = {
                id(parameter)
                for optimizer in self.optimizers()
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
            self._owned_at = self.generation
        return any(id(parameter) in self._owned for parameter in parameters)

    def is_in_each(self, place: Hashable) -> bool:
        """Whether the script comes to this place of its code between all steps.

        To be asked each time that it comes there: it is so if it came there in the step before.
        """
        last, is_in_each = self._places.get(place, (-1, False))
        if last != self.count:
            is_in_each = 0 < self.count == last + 1
            self._places[place] = (self.count, is_in_each)
        return is_in_each


def caller() -> tuple[str, CodeType, int]:
    """Who has called what a cure stands for: file, code and line.

    Our own frames, those of an observer and those of logging lie between.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _lies_between(frame):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_code, frame.f_lineno


def _lies_between(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("flatout.") or name == "logging"
