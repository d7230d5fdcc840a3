"""Loops of the user's code that step or evaluate: which loops are running, and when to end them.

`rewriting.py` wraps the iterable of such a loop in `Loops.around`. A DataLoader ends early by its
own hook, and is given to the loop unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from threading import get_ident
from typing import Any

from flatout.observe.lanes import Lanes

# Maximum number of steps in one iteration of a loop over batches; a loop with more is over epochs.
_STEPS_IN_A_TURN = 2
# Number of iterations after which a loop ends early. STEPPING: for a loop that steps; EVALUATING:
# for a loop that evaluates.
STEPPING, EVALUATING = 4, 2
# Minimum number of steps of a loop that counts as an epoch.
_AN_EPOCH = 2


@dataclass(eq=False)
class Turns:
    """A loop that is running.

    Attributes:
        number: index of the loop in the code.
        length: full number of iterations; None where unknown.
        steps: number of finished steps when its latest iteration began.
        first: number of finished steps when the loop itself began.
        only_steps: whether the loop ends early only if it steps. Code after a `while` may rely on
            its condition, as where the loop collects samples.
        turns: number of finished iterations of the loop.
        short: number of iterations finished since `Loops.ends_early` was set.
        has_stepped: whether one of the iterations counted in `short` has taken a step.
        holds_epochs: whether an inner loop steps, or one iteration takes many steps.
    """

    number: int
    length: int | None
    steps: int
    first: int
    only_steps: bool = False
    turns: int = 0
    short: int = 0
    has_stepped: bool = False
    holds_epochs: bool = False


class Loops:
    """Loops of one thread.

    Attributes:
        ends_early: whether loops end early now.
        ends_unsized: whether stepping loops over iterables without a length, such as enumerate(),
            end early too. A loop over a DataLoader ends when the DataLoader does.
        epochs: number of stepping loops that have ended since `ends_early` was set.
        has_cut: whether any of these loops ended early.
        had_epoch: whether a stepping loop ended before `ends_early` was set.
        cut: by loop index, the number of iterations that ran, and the number without an early end.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._open: list[Turns] = []
        self.ends_early = self.ends_unsized = self.had_epoch = self.has_cut = False
        self.epochs = 0
        self.cut: dict[int, tuple[int, int | None]] = {}
        self._epochs: dict[int, int] = {}  # lengths of loops over epochs that have ended

    @property
    def is_stepping(self) -> bool:
        """True while a loop whose iterations are steps is running."""
        return any(map(self._steps, self._open))

    @property
    def is_counting(self) -> bool:
        """True while a loop with a length, whose iterations are steps, is running."""
        return any(self._steps(item) and item.length is not None for item in self._open)

    def epochs_of(self) -> list[tuple[int, int]]:
        """Return [index, number of iterations] of each loop over epochs."""
        now = self._lanes.steps
        is_open = {
            item.number: item.length
            for item in list(self._open)
            if item.length is not None
            and (item.holds_epochs or now - item.steps > _STEPS_IN_A_TURN)
        }
        return [*(self._epochs | is_open).items()]

    def steps_of_run(self) -> int | None:
        """Return the steps that the open loops would take in total, at the present rate.

        None where that is unknown: a loop has no length, or is in its first iteration.
        """
        taken: float | None = None
        for item in reversed(self._open):
            if item.turns:
                taken = (item.steps - item.first) / item.turns
            taken = None if taken is None or item.length is None else taken * item.length
        return round(taken) if taken else None

    def _steps(self, turns: Turns) -> bool:
        taken = self._lanes.steps - turns.first
        return turns.turns >= 2 and taken >= _AN_EPOCH and not turns.holds_epochs

    def around(self, number: int, what: Iterable[Any] | None) -> Iterable[Any]:
        """Return the wrapped iterable of a loop; None is for a `while`, which ends by itself."""
        if what is None:
            return self._turns(number, repeat(None), only_steps=True)
        module: Any = sys.modules.get("torch.utils.data.dataloader")
        return what if module and isinstance(what, module.DataLoader) else self._turns(number, what)

    def _turns(
        self, number: int, what: Iterable[Any], *, only_steps: bool = False
    ) -> Iterator[Any]:
        lanes = self._lanes
        if lanes.thread != get_ident():
            yield from what
            return
        length = len(what) if isinstance(what, (list, tuple, range)) else None
        turns = Turns(number, length, lanes.steps, lanes.steps, only_steps)
        self._open.append(turns)
        try:
            for item in what:
                yield item
                turns.turns += 1
                taken = lanes.steps - turns.steps
                if taken:
                    turns.steps += taken
                    turns.holds_epochs |= taken > _STEPS_IN_A_TURN
                if self.ends_early and self._ends(turns, taken):
                    ran = turns.turns
                    if isinstance(what, Sequence) and length is not None and ran < length:
                        yield what[-1]
                        ran += 1
                    self.cut.setdefault(number, (ran, length))
                    return
        finally:
            self._close(turns)

    def _ends(self, turns: Turns, taken: int) -> bool:
        turns.short += 1
        turns.has_stepped |= taken > 0
        if turns.length is not None and turns.turns >= turns.length - 1:
            return False  # the loop ends by itself
        if turns.has_stepped:
            may_end = turns.length is not None or self.ends_unsized
            ends = may_end and turns.short >= STEPPING and self._steps(turns)
            self.has_cut |= ends
            return ends
        is_evaluated = turns.short >= EVALUATING and self._lanes.is_open
        return is_evaluated and not turns.only_steps

    def _close(self, turns: Turns) -> None:
        if turns not in self._open:
            return
        self._open.remove(turns)
        steps = self._lanes.steps
        if steps - turns.first < _AN_EPOCH or turns.turns < 2:
            return
        for outer in self._open:
            outer.holds_epochs = True
        if not turns.holds_epochs:
            self.epochs += self.ends_early
            self.had_epoch = True
        elif turns.length is not None:
            self._epochs[turns.number] = turns.length
