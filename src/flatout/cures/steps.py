"""The script's optimizers and their steps, and the lines that run in each step."""

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
    """The script's optimizers and the number of their steps.

    Attributes:
        count: number of steps so far; if optimizers alternate, the number of the optimizer that has
            stepped most often.
        before: functions that are called with an optimizer before it steps.
        after: functions that are called after an optimizer has stepped.
        has_closure: True if the step about to begin was given a closure or another argument.
        generation: number that changes when an optimizer gets parameters.
        thread: id of the thread that trains.
        asked: values that the Recipe asks for, by dotted name.
        of_unstepped: cures of outermost modules that no optimizer steps, such as a backbone that
            the script calls directly.
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
        """Hook into torch.optim."""
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
        """Return the optimizers that still exist."""
        return [
            optimizer
            for reference in self._optimizers.values()
            if (optimizer := reference()) is not None
        ]

    def owns(self, parameters: Iterable[Any]) -> bool:
        """Return True if an optimizer steps one of these parameters."""
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
        """Return True if the script reaches this position of its code between all steps.

        Call this each time the position is reached; the result is True if the position was also
            reached in the previous step.
        """
        last, is_in_each = self._places.get(place, (-1, False))
        if last != self.count:
            is_in_each = 0 < self.count == last + 1
            self._places[place] = (self.count, is_in_each)
        return is_in_each


def caller() -> tuple[str, CodeType, int]:
    """Return the file, code and line that called a patched function.

    Frames of Flatout and of logging are skipped.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _lies_between(frame):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_code, frame.f_lineno


def _lies_between(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("flatout.") or name == "logging"
