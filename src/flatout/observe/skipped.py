"""Losses with NaN or infinity, after which a script continues without an optimizer step.

Hooked are the user's calls of `torch.isnan`, `isinf` and `isfinite` on single numbers, and `loss !=
loss`. Numbers read by the host are checked too, as in `math.isnan(loss.item())`. A step was skipped
if the number was not finite and the same line reads another number after a further call of the
model, with no backward pass in between.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, NamedTuple

from flatout.hooks import Hook, is_anything_compiled, wrap
from flatout.observe.observation import InLoss, Site
from flatout.observe.sites import is_users, users_frame
from flatout.observe.watch import Watch

_GOOD = {"isnan": False, "isinf": False, "isfinite": True}
# _FROM: step after which the functions are hooked; _WEIGHED: step at which the number of their
# calls is checked; _MOST: maximum number of calls per step, since more calls do not check the loss
# alone.
_FROM, _WEIGHED, _MOST = 2, 20, 4
# Step after which the functions are unhooked if no step was skipped.
_SETTLED = 500


class _Read(NamedTuple):
    """A number that was not finite: where and when the host read it."""

    instruction: tuple[int, int]
    site: Site
    now: tuple[int, int]
    calls: int


class SkippedSteps:
    """Counter of numbers that were not finite and that no backward pass followed."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        # The original method: calls of the hooked one would count as the script's.
        self._is_true = torch._C.TensorBase.__bool__
        self._hooks: list[Hook] = []
        self._renew()
        watch.on_number.append(self._number)
        watch.at(_FROM, self._open)
        watch.at(_WEIGHED, self._weigh)
        watch.at(_SETTLED, self._settle)
        watch.on_renewal.append(self._renew)

    @property
    def lines(self) -> list[InLoss]:
        """Findings, one for each line after which steps were skipped."""
        for line, fact in self._skipped.items():
            fact.detail["of"] = self._watch.calls.count("item", line) or self._asked
        return list(self._skipped.values())

    def _renew(self) -> None:
        self._asked = 0
        self._skipped: dict[Site, InLoss] = {}
        # Latest answer, whether True means a finite number, the line, and the time.
        self._latest: tuple[Any, bool, Site, tuple[int, int]] | None = None
        self._read: _Read | None = None
        self._end()

    def _open(self) -> None:
        if is_anything_compiled():
            return  # hooks would make torch.compile compile again
        for owner in (self._torch, self._torch.Tensor):
            for name, good in _GOOD.items():
                self._hooks.append(wrap(owner, name, "observe", self._asking, good))
        self._hooks.append(wrap(self._torch.Tensor, "__ne__", "observe", self._comparing))
        self._watch.quick.on_end.append(self._end)

    def _weigh(self) -> None:
        if self._asked > _MOST * (_WEIGHED - _FROM):
            self._end()

    def _settle(self) -> None:
        if not self._skipped:
            self._end()

    def _end(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    # -- checked on tensors -----------------------------------------------------------------------

    def _asking(self, original: Any, good: bool) -> Any:
        lanes, tensor = self._watch.lanes, self._torch.Tensor

        def ask(number: Any, *args: Any, **kwargs: Any) -> Any:
            answer = original(number, *args, **kwargs)
            if type(number) is tensor and number.numel() == 1 and get_ident() == lanes.thread:
                self._note(answer, good)
            return answer

        return ask

    def _comparing(self, original: Any) -> Any:
        lanes = self._watch.lanes

        def differs(number: Any, other: Any) -> Any:
            answer = original(number, other)
            if other is number and number.numel() == 1 and get_ident() == lanes.thread:
                self._note(answer, good=False)
            return answer

        return differs

    def _note(self, answer: Any, good: bool) -> None:
        frame = sys._getframe(2)
        if not is_users(frame.f_code.co_filename):
            return
        site = Site(frame.f_code.co_filename, frame.f_lineno)
        lanes = self._watch.lanes
        now = lanes.steps, lanes.backwards
        self._asked += 1
        if self._latest is not None:
            before, was_good, line, then = self._latest
            # The answer is read only now: a GPU has computed it meanwhile.
            if then == now and line == site and self._is_true(before) is not was_good:
                self._skips(line)
        self._latest = answer, good, site, now

    def _skips(self, line: Site) -> None:
        fact = self._skipped.setdefault(line, InLoss("skipped", line))
        fact.count += 1
        fact.steps = self._watch.lanes.steps

    # -- read on the host -------------------------------------------------------------------------

    def _number(self, number: float) -> None:
        is_one, before = number - number == 0.0, self._read
        if is_one and before is None:
            return
        lanes = self._watch.lanes
        now, calls = (lanes.steps, lanes.backwards), sum(x.calls for x in self._watch.models)
        frame = users_frame(sys._getframe(2))
        if frame is None:
            return
        instruction = id(frame.f_code), frame.f_lasti
        if before is not None:
            if before.now != now:
                self._read = None
            elif before.instruction == instruction and before.calls != calls:
                self._skips(before.site)
                self._read = None
        is_trained = lanes.steps and not lanes.is_open and self._torch.is_grad_enabled()
        if not is_one and is_trained and self._read is None:
            site = Site(frame.f_code.co_filename, frame.f_lineno)
            self._read = _Read(instruction, site, now, calls)
