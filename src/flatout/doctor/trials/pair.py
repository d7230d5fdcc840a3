"""Two live processes of the same script, measured block by block in the order A B B A.

One process runs at a time, while the other is stopped with all its children. The processes
alternate at step boundaries (step_sync.py), after the device has finished. A block is longer than
the queue of batches that loader workers prefetch. Its first steps, as many as the queue and two
more, are not counted. Time between steps that the process reports, such as evaluation, is not
counted either, unless it is what the trial is about.

The speed of a machine depends on the previous load. On two virtual CPUs steps of 2 ms took 3 ms for
a second after steps of 15 ms had run. Steps of 15 ms took 12 ms for 200 ms after steps of 2 ms had
run. Both effects make the ratio smaller than that of processes that each run alone. So in the last
trial, whose result is promised, each side warms up before its steps count.

A script that ends by itself may be restarted, so that short scripts can be measured too. A stays
alive from one B to the next. A script may slow down with each step, if something grows or if
numbers become denormal. Then an old A would make any new B look fast. If A has slowed down, it is
restarted before the next B, provided that the restart takes less than half of the trial's time.

Two processes of the same script may differ permanently, for example in page faults per step. So the
last trial starts both sides several times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from flatout.doctor.trials.arm import FEWEST_STEPS, WARM_STEPS, Arm, Block, Showed
from flatout.doctor.trials.process import Command, Ended, Process
from flatout.doctor.trials.schedule import Schedule
from flatout.measure import TrialResult, run_trial

_SLACK = 1.5
# _SETTLES_WITHIN: maximum number of blocks in which a cache of unknown size may fill. _AS_FAST: the
# cache counts as full once a block takes more than this share of the time of the block before.
_SETTLES_WITHIN, _AS_FAST = 4, 0.9
# Minimum total seconds of the first steps for a judgment that a cure is hopelessly slow; a shorter
# time may be an accident.
_TELLING_S = 0.5
# Smallest relative slowdown of a long-running A at which A is restarted before a new B, unless
# noise is larger.
_AGED = 0.05
# Smallest relative slowdown at which the script counts as always slowing down. Its processes are
# then not restarted within a trial, since the user's run is one long process too.
_AGES = 0.25


@dataclass
class Pair:
    """Result of a trial.

    Attributes:
        result: ratio of A's step time to B's; None if the trial ended too early.
        cpu: ratio of A's CPU time to B's, which other processes change less; None if not measured.
        reason: why the trial ended early; "" if the trial was complete.
        is_too_short: True if it ended because a script reached its end within a block.
        blocks: blocks in the order in which they ran.
        dropped: number of uncounted steps at the start of each block.
        held: how the processes were contained: "overlay", "landlock" or "python".
        refused: actions that the script was not allowed to do: {"kind", "what", "where"}.
        seconds: seconds of the whole trial, including starts of the processes.
        a, b: results of the two sides except for their times.
    """

    result: TrialResult | None = None
    cpu: TrialResult | None = None
    reason: str = ""
    is_too_short: bool = False
    blocks: list[Block] = field(default_factory=list)
    dropped: int = 0
    held: str = ""
    refused: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    a: Showed = field(default_factory=Showed)
    b: Showed = field(default_factory=Showed)


class Against:
    """Side A, against which other sides are measured one after another; it runs until `close`."""

    def __init__(
        self,
        a: Command,
        folder: Path,
        until: float,
        *,
        passes: Sequence[Path] = (),
        is_redirected: bool | None = None,
        most_steps: int | None = None,
        is_renewed: bool = False,
        started: Callable[[str, Process], None] = lambda side, process: None,
    ) -> None:
        def start(name: str, job: Command, until: float, warm: int) -> Arm:
            return Arm(
                name,
                job,
                folder,
                until,
                passes=passes,
                is_redirected=is_redirected,
                warm=warm,
                most_steps=most_steps,
                is_renewed=is_renewed,
                started=started,
            )

        self._until = until
        self._start = start
        self._has_met = False
        self._young_s = self._old_s = math.inf  # seconds per step of A, when fastest and latest
        self._ages = False
        self._a = start("a", a, until, 0)

    @property
    def has_ended(self) -> bool:
        """True if A has ended, so that nothing can be measured against it."""
        return self._a.has_ended

    @property
    def start_s(self) -> float:
        """Seconds from A's start to its first step; 0 before that."""
        return self._a.showed.started_s

    def measure(
        self,
        b: Command,
        terms: Schedule,
        *,
        budget_s: float,
        warm: int = 0,
        is_vain: Callable[[Showed], str] = lambda b: "",
        fresh: bool = False,
    ) -> Pair:
        """Measure the steps of A against those of B, in the current folder."""
        began = time.monotonic()
        until = min(self._until, began + budget_s)
        pair = Pair(held=self._a.process.held)
        other: Arm | None = None
        try:
            if not self._has_met:
                self._a.meet()
                self._has_met = True
            elif fresh or (self._has_aged(terms.floor) and self.start_s < budget_s / 2):
                self._restart()
            # B may take as long as A to start. A longer start takes from the trial's own time.
            starts = time.monotonic() + _SLACK * self.start_s
            with closing(self._start("b", b, min(self._until, max(until, starts)), warm)) as other:
                other.meet()
                other.until = self._until
                self._warm_up(pair, other)
                reason = is_vain(other.showed) or self._why_hopeless(other, terms.hopeless)
                if reason:
                    raise Ended(reason)
                self._measure(pair, other, terms, until)
        except Ended as error:
            side = self._a
            if other is not None and (other.has_ended or not self._a.has_ended):
                side = other
            pair.reason = f"{side.name}: {error.what}"
            pair.is_too_short = side.process.exit == 0
            pair.result = _from_whole_quadruples(pair.blocks, partial(_time_of, terms=terms), terms)
        if all(block.cpu for block in pair.blocks):
            # The known noise of wall time does not apply to CPU time.
            own = replace(terms, floor=0.0)
            pair.cpu = _from_whole_quadruples(pair.blocks, lambda block: block.cpu_step_s, own)
        sides = [self._a, *([other] if other is not None else [])]
        pair.refused = [item for side in sides for item in side.refused()]
        pair.a = self._a.showed
        pair.b = other.showed if other is not None else Showed()
        pair.seconds = time.monotonic() - began
        self._grow_old(pair)
        return pair

    def _grow_old(self, pair: Pair) -> None:
        steps_s = [block.step_s for block in pair.blocks if block.side == "a"]
        if len(steps_s) > 1:
            half = len(steps_s) // 2
            self._old_s = median(steps_s[-half:])
            self._young_s = min(self._young_s, median(steps_s[:half]), self._old_s)
            self._ages = self._ages or self._old_s > (1 + _AGES) * self._young_s

    def _has_aged(self, floor: float) -> bool:
        return self._old_s > self._young_s * (1 + max(floor, _AGED))

    def _restart(self) -> None:
        if self._a.most_steps is None:
            self._a.renew(self._a.queue + WARM_STEPS)
            self._young_s = self._old_s = math.inf

    def _warm_up(self, pair: Pair, b: Arm) -> None:
        pair.dropped = max(self._a.queue, b.queue) + WARM_STEPS
        if self._a.step_s == math.inf:
            self._a.warm_up(pair.dropped)
        b.warm_up(pair.dropped)

    def _why_hopeless(self, b: Arm, times: float) -> str:
        as_long = b.step_s / self._a.step_s
        # A few short steps may be slow by accident.
        if as_long < times or FEWEST_STEPS * b.step_s < _TELLING_S:
            return ""
        return f"steps took {as_long:.1f} times as long"

    def _measure(self, pair: Pair, b: Arm, terms: Schedule, until: float) -> None:
        a, dropped = self._a, pair.dropped
        left = until - time.monotonic()
        slowest = max(a.step_s, b.step_s)
        steps = terms.steps(slowest, left, dropped, a.most_steps)
        if terms.settles or not b.is_full:
            terms = replace(terms, settles=True)
            _settle(b, dropped, steps, until)
            left = until - time.monotonic()
        length = terms.length(slowest, left, dropped, steps, a.most_steps)
        # A single A B B A proves nothing: two are measured, unless the whole budget ends before.
        two = 8 * length.seconds(slowest) * _SLACK
        if a.most_steps:  # both sides may have to be restarted during the measurement
            two += 2 * (a.showed.started_s + b.showed.started_s)
        left = max(left, min(two, self._until - time.monotonic()))
        renewal_s = a.renewal_s + b.renewal_s
        terms = replace(terms, lives=1) if self._ages else terms
        lives = terms.lives_within(left, renewal_s, 4 * length.seconds(slowest), a.most_steps)

        def measured(side: Arm) -> Callable[[], float]:
            def one() -> float:
                restarts = lives.restart(len(pair.blocks))
                if restarts:
                    a.renew(dropped)
                    b.renew(dropped)
                # A side that runs again after its own block is warm, unless its script ends.
                goes_on = bool(pair.blocks) and pair.blocks[-1].side == side.name and not restarts
                paced, _ = length.of(side.step_s)
                left_out, counted = length.of(side.step_s, is_paced=not goes_on)
                block = side.block(left_out, counted, dropped_again=paced, unit=length.unit)
                pair.blocks.append(block)
                return _time_of(block, terms)

            return one

        pair.result = run_trial(
            measured(a),
            measured(b),
            max_pairs=terms.max_pairs,
            min_pairs=min(max(terms.min_pairs, lives.fewest), terms.max_pairs),
            # The slowest A B B A may include a restart, which the last ones do not need.
            deadline_s=left + (renewal_s if lives.count > 1 else 0.0),
            floor=terms.floor,
            precision=terms.precision,
        )
        if pair.result.pairs == 1 < terms.max_pairs:
            pair.reason = "the time given had room for one comparison only, which proves nothing"

    def close(self) -> None:
        """End the process of this side."""
        self._a.close()


def _settle(side: Arm, dropped: int, steps: int, until: float) -> None:
    half = (time.monotonic() + until) / 2
    while not side.is_full and time.monotonic() < half:
        side.warm_on(dropped, steps)
    for _ in range(_SETTLES_WITHIN):
        before = side.step_s
        side.block(dropped, steps)
        if side.step_s > _AS_FAST * before or time.monotonic() > until:
            return


def _time_of(block: Block, terms: Schedule) -> float:
    return block.whole_step_s if terms.counts_between else block.step_s


def _from_whole_quadruples(
    blocks: Sequence[Block], time_of: Callable[[Block], float], terms: Schedule
) -> TrialResult | None:
    whole = len(blocks) // 4
    if whole < 2:
        return None
    times = {
        side: iter([time_of(block) for block in blocks[: 4 * whole] if block.side == side])
        for side in "ab"
    }
    return run_trial(
        lambda: next(times["a"]),
        lambda: next(times["b"]),
        max_pairs=whole,
        min_pairs=whole,
        floor=terms.floor,
    )
