"""Losses that are no numbers, after which a script goes on without a step.

`torch.isnan`, `isinf` and `isfinite` of single numbers are watched, asked by lines of the user's.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any

from flatout.hooks import Hook, is_anything_compiled, wrap
from flatout.observe.observation import InLoss, Site
from flatout.observe.sites import is_users
from flatout.observe.watch import Watch

_GOOD = {"isnan": False, "isinf": False, "isfinite": True}
# Who asks more often than this in a step asks for more than its loss.
_FROM, _WEIGHED, _MOST = 2, 20, 4


class SkippedSteps:
    """Counts numbers that were none, where no backward pass came before the next one was asked."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        # Those that other hooks see would count as the script's.
        self._is_true = torch._C.TensorBase.__bool__
        self._hooks: list[Hook] = []
        self._renew()
        watch.at(_FROM, self._open)
        watch.at(_WEIGHED, self._weigh)
        watch.on_renewal.append(self._renew)

    @property
    def found(self) -> list[InLoss]:
        """One for each line after which steps were skipped."""
        for fact in self._skipped.values():
            fact.detail["of"] = self._asked
        return list(self._skipped.values())

    def _renew(self) -> None:
        self._asked = 0
        self._skipped: dict[Site, InLoss] = {}
        # The latest answer, whether it is a good one where true, by which line, and when.
        self._latest: tuple[Any, bool, Site, tuple[int, int]] | None = None
        self._end()

    def _open(self) -> None:
        if is_anything_compiled():
            return  # it would be compiled again
        for owner in (self._torch, self._torch.Tensor):
            for name, good in _GOOD.items():
                self._hooks.append(wrap(owner, name, "observe", self._asking, good))
        self._watch.quick.on_end.append(self._end)

    def _weigh(self) -> None:
        if self._asked > _MOST * (_WEIGHED - _FROM):
            self._end()

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _asking(self, original: Any, good: bool) -> Any:
        lanes, tensor = self._watch.lanes, self._torch.Tensor

        def ask(number: Any, *args: Any, **kwargs: Any) -> Any:
            answer = original(number, *args, **kwargs)
            if type(number) is tensor and number.numel() == 1 and get_ident() == lanes.thread:
                frame = sys._getframe(1)
                if is_users(frame.f_code.co_filename):
                    self._note(answer, good, Site(frame.f_code.co_filename, frame.f_lineno))
            return answer

        return ask

    def _note(self, answer: Any, good: bool, site: Site) -> None:
        lanes = self._watch.lanes
        now = lanes.steps, lanes.backwards
        self._asked += 1
        if self._latest is not None:
            before, was_good, line, then = self._latest
            # Read only now: on a GPU it has been computed meanwhile.
            if then == now and line == site and self._is_true(before) is not was_good:
                fact = self._skipped.setdefault(line, InLoss("skipped", line))
                fact.count += 1
                fact.steps = lanes.steps
        self._latest = answer, good, site, now
