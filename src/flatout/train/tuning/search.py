"""The order in which `auto` tries settings, and the rules that end each trial.

    1  plain       A few steps under plain settings show the seconds that the run will take.
    2  together    All options are compared with plain, since options help one another: bf16 alone
                   may be slower where bf16 with channels_last is three times faster. Options that
                   the roofline of this model expects to lose are left out. If steps are long,
                   options without which a few samples ran faster are left out too.
    3  allocator   This option comes before other options, because its limits cannot be undone.
    4  one by one  Each option is compared with the best settings without this option, and dropped
                   if it is not measured faster. If the option, or all options together, won
                   before, the option is dropped only if it surely gains nothing. After changes,
                   each option is tried once more.
    5  parts       In pipeline stages, more or fewer micro-batches are tried.
    6  the whole   If all options together did not win, the remaining options are compared with
                   plain. If they do not win either, plain is chosen.
    7  by length   If batches change in length, other settings are tried for short batches or for
                   long batches. The time to switch between settings is measured too.
    8  compile     This is tried only if the run is long enough to repay the compilation, and if
                   the whole step is not to be compiled in the background.
    9  capture     The whole step as one graph is tried once the graph is compiled
                   (compile_trial.py).

If a roofline knows this machine's rates, the options with the largest expected gain come first, and
options that cannot save more than noise are not tried.

Settings that are far slower are given up at once, if they also take more CPU time. Wall time alone
is no proof, since other work on the machine can make any step take many times as long.

The search is a generator: it yields Blocks of the job's own steps and is sent their BlockTimes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flatout.data import Batch
from flatout.measure import PossibleSaving, TrialResult, quadruples, run_trial
from flatout.recipe import Trial
from flatout.train.settings import LIVE, Settings
from flatout.train.tuning.budget import Budget
from flatout.train.tuning.crash_markers import Marks
from flatout.train.tuning.per_length_timing import ByLength, Lengths

# _LONGER_BLOCK_S: maximum seconds of a block of steps. _BLOCK_SHARE: fraction of the run's seconds
# that a block takes, up to that maximum.
_LONGER_BLOCK_S, _BLOCK_SHARE = 0.25, 0.002
# Sizes of blocks if batches change in length. _MIXED_STEPS: minimum number of steps in a block.
# _FIRST_MIXED: number of steps in the first block, under plain settings.
_MIXED_STEPS, _FIRST_MIXED = 4, 24
# Noise of a trial, as a fraction of a step's time, below which two settings count as equally fast.
TIE_FLOOR = 0.015
# _LOST_PAIRS: minimum number of pairs of blocks that must show a loss smaller than _SMALL, since
# two pairs agree by chance too often. _SMALL: loss, as a fraction of a step's time, from which
# fewer pairs are enough.
_LOST_PAIRS, _SMALL = 4, 0.1
# Minimum gain that counts, as a fraction of a step's time.
_LEAST_GAIN = 0.005
# Start of the message for an option without a measurement.
_NOT_MEASURED = "was not measured"
# Ratio of step times from which a single round of four blocks proves a loss, and a step counts as
# slow.
_FAR_SLOWER = 1.5
# Expected extra time of the first pair of blocks of an unmeasured option, as a fraction of a step.
# _UNKNOWN: the usual value. _UNLIKELY: the value if a few samples with the option took less than
# _CLEARLY_FASTER of the time without the option.
_UNKNOWN, _CLEARLY_FASTER, _UNLIKELY = 0.3, 0.8, 0.1
# _FAULT_S: approximate seconds of a page fault. _WORTH: minimum saving that is worth a trial, as a
# fraction of a step's time.
_FAULT_S, _WORTH = 2.5e-7, 0.01
# Steps shorter than this, in seconds, are tried on one thread; longer steps keep all CPUs busy.
SHORT_STEP_S = 0.02
COUNT = "world.micro_batches"
"""The number of parts in which a batch passes through stages."""
_BUSY = "stays as it was: the machine is too busy to measure"
# Fraction of the run after which the captured graph is no longer tried.
_LATE = 0.9


class Failed(Exception):
    """Raised in the search by the caller, where a block could not be run."""


@dataclass(frozen=True)
class Option:
    """A setting that may be faster.

    Attributes:
        field: dotted name of the setting in the Recipe.
        trial: the value to try, with the reason why it may be faster.
    """

    field: str
    trial: Trial

    @property
    def setting(self) -> str:
        """Name of the option in Settings."""
        return self.field.partition(".")[2]

    @property
    def value(self) -> Any:
        """Value that is tried."""
        return self.trial.value


class Block(NamedTuple):
    """Steps to run under some settings: first `settle` steps that are not timed, then `steps`."""

    settings: Settings | ByLength
    steps: int
    settle: int


class BlockTimes(NamedTuple):
    """Measured times of a Block.

    Attributes:
        seconds: seconds per timed step.
        total_s: seconds of all steps of the Block, and of the switch to its settings.
        steps: number of all steps of the Block.
        last: number of the last step.
        faults: page faults per timed step.
        cpu_s: seconds of this process' CPU time per timed step; on a GPU the same as `seconds`.
        total_cpu_s: seconds of CPU time of all steps; on a GPU the same as `total_s`.
    """

    seconds: float
    total_s: float
    steps: int
    last: int
    faults: float
    cpu_s: float
    total_cpu_s: float


_Steps = Generator[Block, BlockTimes, Any]


def is_slow(step_s: float) -> bool:
    """Return whether a step is longer than a block, so that a single step is a measurement."""
    return step_s > _LONGER_BLOCK_S


def is_faster(trial: TrialResult) -> bool:
    """Return whether B won; a single round of four blocks proves a gain of half and more."""
    return trial.wins or (trial.pairs == 1 and trial.ratio > _FAR_SLOWER + 3 * trial.floor)


def _is_clear(trial: TrialResult) -> bool:
    if trial.pairs == 1:
        return is_faster(trial) or 1 / trial.ratio > _FAR_SLOWER + 3 * trial.floor
    is_lost = trial.loses and (trial.pairs >= _LOST_PAIRS or trial.ratio < 1 - _SMALL)
    return trial.wins or is_lost or (trial.is_tie and trial.floor <= TIE_FLOOR)


def _gives_nothing(trial: TrialResult) -> bool:
    return trial.high <= 1 + _LEAST_GAIN


@dataclass
class Search:
    """The order of trials, and their results.

    Attributes:
        dropped: fields that are not tried or not measured, with the reason.
        kept: fields whose value stays without a trial, with the reason.
        slower: by field, the ratio of a few samples' time under the option to plain settings.
        promises: by field, the saving per step that a roofline expects; set before the first block
            has ended.
        splits: whether settings may depend on the length of a step's batches.
        lengths: step times by the length of their batches.
        tried_split: settings by length that are compared with `best`, only on the steps that they
            change.
        by_length: settings by length that were measured faster than `best` for all batches, or
            None.
        varied: whether batches change in length; set before a block has ended.
        best: the settings that were measured fastest so far.
        results: trials by field, in which B has the option and A does not have it.
        together: the trial of all options.
        whole: the trial of `best` against plain.
        step_s: seconds per step by settings, from the latest measurement.
        trials: all trials, as plain data.
        faults: page faults of a step before and after the allocator was set to keep memory.
        compile_s: seconds that compiling took.
        stays: whether an earlier choice holds because the machine was too busy to measure.
        late: the reason why an option was not measured again after other options had changed.
    """

    plain: Settings
    options: list[Option]
    budget: Budget
    modules: int = 0
    threads: bool = False
    compiles: bool = False
    captures: bool = False
    prefers_capture: Callable[[], bool] = lambda: False
    counts: tuple[Sequence[int], Sequence[int]] = ((), ())
    few_s: float | None = None
    is_settled: bool = False
    starts_cold: bool = False
    fastest: frozenset[str] | None = None
    unchecked: list[Option] = field(default_factory=list)
    check: Callable[[Sequence[Option], Settings, Batch], str] = lambda *looked_at: ""
    marks: Marks = field(default_factory=Marks)
    promises: dict[str, PossibleSaving] = field(default_factory=dict)
    varied: bool = False
    splits: bool = False
    lengths: Lengths = field(default_factory=Lengths)
    by_length: ByLength | None = None
    tried_split: ByLength | None = None
    dropped: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    slower: dict[str, float] = field(default_factory=dict)
    results: dict[str, TrialResult] = field(default_factory=dict)
    together: TrialResult | None = None
    whole: TrialResult | None = None
    step_s: dict[Settings | ByLength, float] = field(default_factory=dict)
    trials: list[dict[str, Any]] = field(default_factory=list)
    faults: tuple[float, float] = (0.0, 0.0)
    compile_s: float = 0.0
    stays: bool = False
    late: str = ""

    def __post_init__(self) -> None:
        self._is_again, self._trials_before = False, 0
        self._terms = self.budget.terms
        self.best = self.plain
        self._at = 0
        self._until = self._terms.searched
        self._now: Settings | ByLength | None = None
        self._cpu_s: dict[Settings | ByLength, float] = {}  # per step, as in `step_s`
        self._measured: dict[tuple[Settings | ByLength, ...], TrialResult] = {}
        self._noted: dict[tuple[Settings | ByLength, ...], dict[str, Any]] = {}
        self._skipped: list[Option] = []

    @property
    def _rest(self) -> list[Option]:
        return [option for option in self.options if LIVE[option.setting].switches != "once"]

    @property
    def measured_nothing(self) -> bool:
        """Whether settings were to be tried again, and no trial was made."""
        return bool(self.late) and len(self.trials) == self._trials_before

    @property
    def disturbed(self) -> bool:
        """Whether other work on this machine made the measurements too coarse to keep."""
        floors = [trial.floor for trial in self._measured.values()]
        return bool(floors) and statistics.median(floors) > self._terms.noise

    @property
    def lacked_time(self) -> bool:
        """Whether there was no time to measure some option."""
        return any(why.startswith(_NOT_MEASURED) for why in self.dropped.values())

    def run(self) -> _Steps:
        """Yield one block after another; `best` is valid whenever the search ends."""
        first = yield Block(self.plain, 1, 1 if self._is_slow(self.budget.step_s) else 2)
        self._keep_times(self.plain, first)
        while self.budget.steps is None and self.budget.elapsed_s < self._terms.sure_s:
            yield Block(self.plain, 1, 0)
        if self._is_slow(first.seconds) and not self.varied:
            seconds = self.budget.step_s = first.seconds
        else:
            seconds = yield from self._run(self.plain)
        if self.varied:
            yield Block(self.plain, _FIRST_MIXED, 0)
            seconds = yield from self._run(self.plain)
        self._order(seconds)
        yield from self._all_together()
        for option in self.options:
            if option.setting == "allocator":
                yield from self._allocator(option)
        if self.threads and self.plain.threads > 1 and seconds < SHORT_STEP_S:
            why = "short steps run faster on one thread"
            self.options.append(Option("process.threads", Trial(1, bool, why=why)))
        yield from self._one_by_one()
        yield from self._micro_batches()
        yield from self._confirm()
        yield from self._by_length()
        if self.compiles and not (self.captures and self.prefers_capture()):
            yield from self._compiled()

    def captured(self) -> _Steps:
        """Compare the whole step as one compiled graph with the best settings without it."""
        self._until = _LATE
        if self.best not in self.step_s:
            yield from self._run(self.best)
        yield from self._graph("compute.capture", "on", "one compiled graph for the whole step")
        if self.best.capture == "on":
            self.whole = None  # the trial against plain was made without the graph

    def again(self) -> _Steps:
        """Search again later in the run, from the best settings on; discard earlier measurements.

        Where steps run as one graph, check only that the graph is still the fastest: under other
        settings it would have to be compiled again. A choice stays if the machine is too busy.
        """
        self._is_again, self.stays, self.late = True, False, ""
        self._trials_before = len(self.trials)
        if self.captures and self.best.capture == "on":
            before = self.best
            self._forget()
            self.best = before.but(capture="off")
            yield from self._run(self.best)
            yield from self.captured()
            if self.stays:
                self.best = before
            if self.best == before:
                return
        self._until = self._terms.searched
        while self._skipped:
            option = self._skipped.pop()
            self.options.append(option)
            del self.dropped[option.field]
        self._forget()
        self.results.clear()
        self.kept.clear()
        self.together = self.whole = None
        self.by_length = self.tried_split = None
        yield from self._run(self.best)
        yield from self._one_by_one()
        yield from self._confirm()
        yield from self._by_length()

    def _forget(self) -> None:
        self._measured.clear()
        self.step_s.clear()
        self._cpu_s.clear()
        self.lengths, self._now = Lengths(), None

    def tells_of(self, field: str) -> bool:
        """Return whether a field was measured, or has another value than the plain value."""
        if field == "together" and self.together is not None:
            return True
        return field in self.results or self._is_chosen(field)

    # -- trials ------------------------------------------------------------------------------

    def _order(self, seconds: float) -> None:
        for option in self._rest:
            promise = self.promises.get(option.field)
            if promise is not None and promise.most_s < _WORTH * seconds:
                share = promise.most_s / seconds
                self.dropped[option.field] = f"not tried: at most {share:.1%} to gain"
                self.options.remove(option)
                self._skipped.append(option)
        self.options.sort(key=lambda option: (not self._helps(option), -self._saved(option)))

    def _saved(self, option: Option) -> float:
        promise = self.promises.get(option.field)
        return 0.0 if promise is None else promise.saved_s

    def _allocator(self, option: Option) -> _Steps:
        kept = self.best.but(allocator=option.value)
        before = yield Block(self.best, self._count(self.best), 0 if self._now == self.best else 1)
        self._now = self.best
        if before.faults * _FAULT_S < _WORTH * before.seconds:
            self.dropped[option.field] = f"{before.faults:,.0f} page faults a step: too few"
            return
        a: list[float] = []
        b: list[float] = []
        for _ in range(4):
            a.append((yield from self._run(self.best)))
        after = before
        for number in range(4):
            after = yield Block(kept, self._count(self.best), 0 if number else 1)
            self._account(after, kept)
            b.append(after.seconds)
        self._now = kept
        self.faults = (before.faults, after.faults)
        of_a, of_b = iter(a), iter(b)
        result = run_trial(lambda: next(of_a), lambda: next(of_b), max_pairs=2)
        self._keep_result(option.field, result)
        self._note(self.best, kept, after.last - 8, result)
        if is_faster(result):
            self.best, self.step_s[kept] = kept, statistics.median(b)

    def _all_together(self) -> _Steps:
        helping = [option for option in self._rest if self._helps(option)]
        if len(helping) < 2 or "together" in self.dropped:
            return
        everything = self.best.but(**{option.setting: option.value for option in helping})
        slower = self.slower.get("together", 1.0)
        self.together = yield from self._compare(self.best, everything, slower)
        if self.together is not None and is_faster(self.together):
            self.best = everything

    def _helps(self, option: Option) -> bool:
        if self.fastest is not None and LIVE[option.setting].in_passes:
            return option.field in self.fastest
        return self._saved(option) >= 0

    def _one_by_one(self) -> _Steps:
        tried = set()
        for _ in range(2):
            before = self.best
            for option in self._rest:
                off = self.best.but(**{option.setting: getattr(self.plain, option.setting)})
                on = self.best.but(**{option.setting: option.value})
                if (off, on) in tried:
                    continue
                tried.add((off, on))
                slower = self.slower.get(option.field, 1.0) if self.best == off else 1.0
                result = self._measured.get((off, on))
                if result is None:
                    result = yield from self._compare(off, on, slower, option.field)
                if result is None or self._is_hidden(option.field, result):
                    continue
                wins = self._stays(option.field, result)
                self._noted[off, on]["chosen"] = "b" if wins else "a"
                self._keep_result(option.field, result)
                self.best = on if wins else off
            if self.best == before:
                return

    def _stays(self, field: str, result: TrialResult) -> bool:
        proven = [one for one in (self.results.get(field), self.together) if one is not None]
        return is_faster(result) or (any(map(is_faster, proven)) and not _gives_nothing(result))

    def _confirm(self) -> _Steps:
        base = self.plain.but(allocator=self.best.allocator)
        if self.best == base:
            return
        if self.together is not None and is_faster(self.together):
            self.whole = self.together
            return
        self.whole = self._measured.get((base, self.best))
        if self.whole is None:
            self.whole = yield from self._compare(base, self.best, 1.0)
        if self.whole is None or self._is_hidden("together", self.whole):
            return
        if is_faster(self.whole) or self.whole.low > 1:
            return
        if self.whole.floor > self._terms.noise and not _gives_nothing(self.whole):
            self.whole = None  # noise hides the result: each option's own trial decides
        else:
            self.best = base

    def _is_hidden(self, field: str, trial: TrialResult) -> bool:
        is_told = is_faster(trial) or trial.loses or trial.floor <= self._terms.noise
        if is_told or not self._is_again:
            return False
        self.stays = True
        self._leave(field, _BUSY)
        return True

    def _micro_batches(self) -> _Steps:
        before = self.best
        reasons = ("ranks idle for less time", "parts are larger")
        for why, numbers in zip(reasons, self.counts, strict=True):
            for number in numbers:
                off, on = self.best, self.best.but(micro_batches=number)
                result = yield from self._compare(off, on, 1.0, COUNT)
                wins = result is not None and is_faster(result)
                if result is not None and (wins or off == before):
                    self._keep_result(COUNT, result)
                    option = Option(COUNT, Trial(number, bool, why=why))
                    self.options = [o for o in self.options if o.field != COUNT] + [option]
                if not wins:
                    break
                self.best = on
                self.dropped.pop(COUNT, None)
            if self.best != before:
                return

    def _by_length(self) -> _Steps:
        # The graph would have to be captured again for other settings.
        may_split = self.splits and self.varied and self.best.capture == "off"
        split = self.lengths.split(self.best) if may_split else None
        if split is None:
            return
        self.step_s[split] = self.step_s[self.best]  # the expected upper limit
        self.lengths.base = self.best
        self.tried_split = split
        result = yield from self._compare(self.best, split, 1.0, "by length")
        self.tried_split = None
        if result is not None and is_faster(result):
            self.by_length = split

    def _compiled(self) -> _Steps:
        field, (fixed, each) = "compute.compile", self._terms.compile_s
        most = fixed + each * self.modules
        if not self.budget.pays_for(most):
            run_s = self.budget.run_s
            self.dropped[field] = f"the run takes about {run_s:.0f} s, too short to repay compiling"
            return
        self.compile_s = yield from self._graph(field, "on", "one kernel for many operators")

    def _graph(self, field: str, value: str, why: str) -> Generator[Block, BlockTimes, float]:
        option = Option(field, Trial(value, bool, why=why))
        off, on = self.best, self.best.but(**{option.setting: value})
        try:
            look = yield Block(on, 1, 1)
        except Failed as failed:
            self.dropped[field] = str(failed)
            return 0.0
        # Compiling also waits for other processes, so CPU time does not show its cost.
        self._account(look._replace(total_cpu_s=math.inf), on)
        self._keep_times(on, look)
        result = yield from self._compare(off, on, 1.0, field)
        if result is not None:
            self.options = [option for option in self.options if option.field != field] + [option]
            self._keep_result(field, result)
            if self._is_hidden(field, result):
                pass
            elif is_faster(result):
                self.best, self.by_length = on, None
            else:
                self.best = off
        return look.total_s

    # -- measurement -------------------------------------------------------------------------

    def _compare(
        self,
        off: Settings,
        on: Settings | ByLength,
        slower: float,
        field: str = "together",
    ) -> Generator[Block, BlockTimes, TrialResult | None]:
        challenger = on if self.best == off else off
        steps, first = self.budget.steps, self._at + 1
        if steps is not None and self._at > self._until * steps:
            self._not_measured(field, "the run is half over")
            return None
        known = challenger in self.step_s
        begins = (
            self._affords_pair(challenger) if known else self._affords(2 * self._unknown(slower))
        )
        if not begins:
            self._not_measured(field, "the run is too short for it")
            return None

        def enough(result: TrialResult) -> bool:
            over = steps is not None and self._at > self._until * steps
            is_clear = _is_clear(result)
            if result.pairs == 1 and result.ratio < 1:
                # Other work may have slowed both of the two middle blocks.
                is_clear &= self._times(on, off) > _FAR_SLOWER
            return is_clear or over or not self._affords_pair(challenger)

        blocks = quadruples(
            off,
            on,
            max_pairs=self._terms.most_pairs,
            min_pairs=self._terms.most_pairs,  # only `enough` ends the trial earlier
            floor=_LEAST_GAIN,
            enough=enough,
        )
        wanted = next(blocks)
        while True:
            try:
                seconds = yield from self._run(wanted)
            except Failed as failed:
                self._leave(field, str(failed))
                return None
            if self._too_costly(challenger):
                times = self._times(challenger, self.best)
                side = "with" if challenger == on else "without"
                words = f"a step takes {times:.1f} times as long {side} it"
                words = words if times > _FAR_SLOWER else f"{_NOT_MEASURED}: there was no time left"
                self._leave(field, words)
                return None
            try:
                wanted = blocks.send(seconds)
            except StopIteration as end:
                result: TrialResult = end.value
                break
        self._measured[off, on] = result
        self._note(off, on, first, result)
        return result

    def _not_measured(self, field: str, why: str) -> None:
        if field in self.results or field in self.dropped:
            return
        if self._is_again:
            self.late = why
            self._leave(field, f"stays as it was: {why}")
        elif not self._is_chosen(field):
            self.dropped[field] = f"{_NOT_MEASURED}: {why}"

    def _leave(self, field: str, why: str) -> None:
        (self.kept if self._is_chosen(field) else self.dropped)[field] = why

    def _is_chosen(self, field: str) -> bool:
        chosen = self.best.other_than(self.plain)
        return bool(chosen) if field == "together" else field in chosen

    def _keep_result(self, field: str, result: TrialResult) -> None:
        """Keep a field's trial, and remove the reason why there was none."""
        self.results[field] = result
        self.dropped.pop(field, None)

    def _run(self, settings: Settings | ByLength) -> Generator[Block, BlockTimes, float]:
        if settings not in self.step_s:
            # The first step may be slow just once. The second is skipped if the first was too slow,
            # unless the first step loads kernels.
            for number in range(1 if self._is_slow(self.budget.step_s) else 2):
                look = yield Block(settings, 1, 0)
                self._keep_times(settings, look)
                self._account(look, settings)
                if self._too_costly(settings) and not (self.starts_cold and number == 0):
                    return look.seconds
        settle = 0 if settings == self._now else 1
        done = yield Block(settings, self._count(settings), settle)
        self._keep_times(settings, done)
        self._account(done, settings)
        if settings == self.best:
            self.budget.step_s = done.seconds
        return done.seconds

    def _keep_times(self, settings: Settings | ByLength, done: BlockTimes) -> None:
        self._now = settings
        self.step_s[settings], self._cpu_s[settings] = done.seconds, done.cpu_s

    def _times(
        self,
        settings: Settings | ByLength,
        than: Settings | ByLength,
        wall_s: float | None = None,
        cpu_s: float | None = None,
    ) -> float:
        wall_s = self.step_s[settings] if wall_s is None else wall_s
        cpu_s = self._cpu_s.get(settings, math.inf) if cpu_s is None else cpu_s
        times = wall_s / self.step_s[than]
        known = self._cpu_s.get(than)
        if known is None or self._threads(settings) != self._threads(than):
            return times
        return min(times, cpu_s / known)

    @staticmethod
    def _threads(settings: Settings | ByLength) -> int | None:
        return settings.threads if isinstance(settings, Settings) else None

    def _is_slow(self, step_s: float) -> bool:
        return not self.starts_cold and is_slow(step_s)

    @staticmethod
    def _unknown(slower: float) -> float:
        return _UNLIKELY if slower < _CLEARLY_FASTER else max(_UNKNOWN, slower - 1)

    def _too_costly(self, settings: Settings | ByLength) -> bool:
        known = settings in self.step_s and settings != self.best
        return known and not self._affords_pair(settings)

    def _count(self, settings: Settings | ByLength) -> int:
        block_s = max(self._terms.block_s, min(_LONGER_BLOCK_S, _BLOCK_SHARE * self.budget.run_s))
        fewest = _MIXED_STEPS if self.varied else 1
        return max(fewest, min(self._terms.most_steps, round(block_s / self.step_s[settings])))

    def _account(self, done: BlockTimes, settings: Settings | ByLength) -> None:
        """Charge to the budget the time that these steps lost against the best settings."""
        self._at = done.last
        if settings != self.best:
            times = self._times(settings, self.best, done.total_s, done.total_cpu_s)
            self.budget.lost_s += max(0.0, times - done.steps) * self.step_s[self.best]

    def _affords(self, steps: float) -> bool:
        return self.budget.pays_for(steps * self.step_s[self.best])

    def _affords_pair(self, challenger: Settings | ByLength) -> bool:
        excess = (self._times(challenger, self.best) - 1) * self.step_s[self.best]
        return excess <= 0 or self.budget.pays_for(2 * self._count(challenger) * excess)

    def _note(
        self, off: Settings, on: Settings | ByLength, first: int, result: TrialResult
    ) -> None:
        self._noted[off, on] = {
            "a": off.other_than(self.plain),
            "b": on.other_than(self.plain),
            "first": first,
            "last": self._at,
            **result.figures,
            "chosen": "b" if is_faster(result) else "a",
        }
        self.trials.append(self._noted[off, on])
