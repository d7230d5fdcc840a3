"""Compiles the step of a small model during the run, if that saves time, and measures the cost.

The compiling child process is paused for short periods, so that steps during the compilation are
compared with steps without it in the same state of the machine. The time by which steps were slower
is part of the cost of tuning. Steps that keep all CPUs busy run on one thread less meanwhile, so
that the child gets a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.data import Batch
from flatout.measure import usable_cpus
from flatout.train.graphs.capture import Capture, lends_cpu
from flatout.train.graphs.compile_pauses import CompilePauses
from flatout.train.tuning.search import Search
from flatout.words import duration

FIELD = "compute.capture"
# Reason against compiling in a run of unknown length, until the run has lasted for longer.
NOT_YET = "a run of unknown length repays compiling only once it has lasted some minutes"
# Maximum seconds of a step that is compiled: in longer steps, Python calls take little of the time.
_SHORT_S = 0.005
# Time that steps lose while a child process compiles on another CPU, as a fraction of the compiling
# time.
_SLOWED = 0.05
# The rest of the run must last at least this multiple of the compiling time.
_REPAID = 4.0


def objection(search: Search) -> str:
    """Return the reason against compiling the step during this run; "" without one."""
    return _unfit(search) or _too_short(search)


def _unfit(search: Search) -> str:
    step_s = search.step_s.get(search.best)
    if search.best.compile != "off":
        return "the model is compiled already"
    if search.varied:
        return "batches are of different shapes"
    if step_s is None or search.few_s is None:
        return "steps were not measured"
    if step_s > _SHORT_S:
        return f"steps take {duration(step_s)}, and calling operators is a small part of that"
    if search.few_s < search.budget.terms.calls * step_s:
        return (
            "calling operators is a small part of a step: a step on a few samples takes "
            f"{search.few_s / step_s:.0%} of the time"
        )
    return ""


def _too_short(search: Search) -> str:
    budget, terms = search.budget, search.budget.terms
    is_known = budget.steps is not None
    left_s = budget.run_s - budget.elapsed_s if is_known else budget.elapsed_s
    cost_s = terms.trace_s + _slowed(search) * terms.capture_s
    if left_s >= _REPAID * terms.capture_s and budget.pays_for(cost_s):
        return ""
    if is_known:
        return f"the run takes about {duration(budget.run_s)}, too short to repay compiling"
    return NOT_YET


def _slowed(search: Search) -> float:
    threads = search.best.threads
    if lends_cpu(threads, search.threads):
        trial = search.results.get("process.threads")
        return 1 / threads if trial is None else max(_SLOWED, 1 / trial.ratio - 1)
    return _SLOWED if threads < usable_cpus() else 1.0


class BackgroundCompile:
    """The compilation of a step by a child process during the run.

    Attributes:
        is_open: whether the compiled package may still arrive.
        waits: whether `judge` must be repeated once a run of unknown length has lasted longer.
        has_begun: whether the step was traced for compiling.
        is_there: whether the compiled graph is loaded.
        seconds: seconds that the child process took to compile.
        traced_s: seconds for which the run was paused for tracing.
        steps: numbers of the first and the last step during the compilation.
    """

    def __init__(self, capture: Capture, compute: Any, search: Search) -> None:
        self._capture, self._compute, self._search = capture, compute, search
        self._clock = search.budget.terms.clock
        search.prefers_capture = lambda: not objection(search)
        self.is_open, self.waits = False, search.is_settled
        self.has_begun = self.is_there = False
        self.seconds = self.traced_s = 0.0
        self.steps = (0, 0)
        self._spells = CompilePauses(search.budget.terms)

    @property
    def cost_s(self) -> float:
        """Seconds that steps lost to the compiling child."""
        return self._spells.cost_s

    def judge(self) -> None:
        """Decide whether to compile, once all other settings are decided; at most once."""
        if self.has_begun or not self._search.captures:
            return
        # Settings that were decided in an earlier run do not need this check: that run has checked
        # that the step fits.
        unfit = "" if self._search.is_settled else _unfit(self._search)
        why = unfit or _too_short(self._search)
        self.is_open = not why
        self.waits = bool(why) and not unfit and self._search.budget.steps is None
        if why:
            self._search.dropped[FIELD] = why
        else:
            self._search.dropped.pop(FIELD, None)

    def begin(self, batches: Sequence[Batch], number: int) -> None:
        """Trace the step that was just made, and start the child if no package is kept."""
        self.has_begun, self.steps = True, (number + 1, number + 1)
        began = self._clock()
        self._capture.begin(self._compute, batches)
        self.traced_s = self._clock() - began
        self._search.budget.lost_s += self.traced_s
        self._ask()

    def after(self, seconds: float, number: int) -> None:
        """Count a step, and poll the child at the end of each period."""
        self.steps = (self.steps[0], number)
        if not self._spells.count(seconds):
            return
        self._ask()
        if self._capture.compiling is None:
            return
        if self.cost_s > self._search.budget.left_s:
            self.drop(f"compiling during the run cost its steps {duration(self.cost_s)}: too much")
            return
        self._spells.is_alone = not self._spells.is_alone
        self._capture.hold(self._spells.is_alone)

    def _ask(self) -> None:
        compiling = self._capture.compiling
        self.seconds = self.seconds if compiling is None else compiling.seconds
        self.is_there = self._capture.is_there(self._compute)
        if self._capture.why:
            self.drop(self._capture.why)
        elif self.is_there:
            self._close()

    def drop(self, why: str) -> None:
        """Give the compilation up, for the given reason."""
        self._search.dropped[FIELD] = why
        self._capture.close()
        self._close()

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._search.budget.lost_s += max(0.0, self.cost_s)

    def record(self) -> dict[str, Any] | None:
        """Return the record for History; None where no compilation has begun."""
        if not self.has_begun:
            return None
        return {
            "first": self.steps[0],
            "last": self.steps[1],
            "compile_s": self.seconds,
            "traced_s": self.traced_s,
            "cost_s": max(0.0, self.cost_s),
            "is_there": self.is_there,
        }
