"""Runs a Search on the job's own steps: switches settings between steps, and times the steps.

A step under tried settings is a normal step of the run. If it fails, or its gradients are not
finite, its effects are undone and it is made again under the best settings known. Several ranks
switch at the same step: after each block they agree on the times that decide.

When no option is left to try, single steps are timed at intervals. If the pace has changed
permanently, settings are tried once more. If other parameters train than before, the job counts as
another job (parts/other_job.py).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from flatout.data import Batch, tensors_in
from flatout.measure import ROUGH, PossibleSaving, finish_device, page_faults, possible_savings
from flatout.train.feed import Feed
from flatout.train.graphs.graphs import graphs_of
from flatout.train.micro_batch import forget_frames
from flatout.train.part import Done, Part, Step
from flatout.train.settings import LIVE, Settings
from flatout.train.snapshot import Moving
from flatout.train.step import Stepper
from flatout.train.tuning.compile_trial import FIELD as CAPTURE
from flatout.train.tuning.compile_trial import BackgroundCompile
from flatout.train.tuning.crash_markers import EndsProcess, failure
from flatout.train.tuning.per_length_timing import ByLength, TimedStep
from flatout.train.tuning.search import Block, BlockTimes, Failed, Search
from flatout.train.turn import Turn
from flatout.words import rounded
from flatout.world import World

# Number of steps between two checks of the pace (seconds per step) once the search is over.
# _LOOK_EVERY: the usual number. _LOOK_AGAIN: the number while the pace seems to have changed.
_LOOK_EVERY, _LOOK_AGAIN = 100, 5
# Minimum factor by which a step's time must change to count as another pace.
_CHANGED = 1.4
# Number of successive checks with another pace after which settings are tried again.
_LOOKS = 4


class Tuner(Part):
    """Tries settings on the steps of a run.

    Attributes:
        search: the candidates and their results.
        done: True if the search has ended.
        why: the reason for an early end of the search; "" without one.
        suffices: True if the next run need not search, although the search ended early.
        spans: the settings of past steps: the first step, the last step, and their settings.
        beside: the compilation of the step in a child process during the run; None without one.
        of_capture: True if the latest decision was about compiling only.
        since: the number of the last step before the search.
    """

    def __init__(
        self,
        search: Search,
        stepper: Stepper,
        feed: Feed,
        world: World,
        settle: Callable[[Tuner], None],
        note: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
        uncounted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.search = search
        self.done = False
        self.why = ""
        self.suffices = False
        self.spans: list[tuple[int, int, Settings | ByLength]] = []
        self._look_at = 0
        self._stepper, self._feed, self._world = stepper, feed, world
        self._graphs = graphs_of(stepper)
        self._settle, self._note = settle, note
        terms = self._terms = search.budget.terms
        self._clock, self._cpu_clock = terms.clock, terms.cpu_clock
        self._is_on_cpu = stepper.switch.device.type == "cpu"
        self._changed_job, self._uncounted = changed, uncounted
        # Records of earlier jobs in this run: trials, dropped fields, compilations, and the cost in
        # seconds (before steps, in steps).
        self._trials: list[dict[str, Any]] = []
        self._dropped: dict[str, str] = {}
        self._captures: list[dict[str, Any]] = []
        self._spent = (0.0, 0.0)
        self.since = 0
        self._moving = Moving(stepper.switch.model, draws=world.size == 1)
        self._kind: Any = None
        self._changed = 0
        # _is_of_graph: whether the known pace is that of the graph that the Recipe requests.
        # _paces: seconds of steps while a new pace is being measured.
        self._is_of_graph = False
        self._paces: list[float] | None = None
        self._look_every = _LOOK_EVERY
        self._trained = self._trainable()
        self._first = self._last = 0
        # Settings that steps of this job have used. New settings first run under a mark
        # (crash_markers.py).
        self._stepped: set[Settings | ByLength] = set()
        self._started: float | None = None
        self.beside: BackgroundCompile | None = None
        self.of_capture = False
        search.splits = world.size == 1
        self._start()

    @property
    def next_step(self) -> int:
        """Number of the next step that must be handed to `make`; earlier steps need not be."""
        rests = self._look_at == sys.maxsize
        each = self.is_searching or self.search.by_length is not None
        return 0 if each and not rests else self._look_at

    @property
    def holds(self) -> Settings | ByLength:
        """The fastest settings known."""
        return self.search.by_length or self.search.best

    @property
    def is_searching(self) -> bool:
        """Whether options are left to try."""
        return not self.done and not self.why

    @property
    def is_pending(self) -> bool:
        """Whether only the trial of the whole step as one graph, now compiling, is left."""
        return self.beside is not None and self.beside.is_open

    def expect(self, counts: Mapping[str, Any]) -> None:
        """Order the options by a roofline's predictions; all ranks use the first rank's."""
        rates, known = counts["rates"], {}
        if rates is not None and rates["spread"] <= ROUGH:
            options = {one.field: one.value for one in self.search.options}
            known = possible_savings(counts, rates, options)
        found = self._world.from_first({f: list(promise) for f, promise in known.items()})
        self.search.promises = {field: PossibleSaving(*promise) for field, promise in found.items()}

    # -- a step ------------------------------------------------------------------------------

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step under the settings that are due; give up a setting that fails."""
        if step.number < self.next_step:
            return run(step)
        return self.make(step, run, *self._terms.input_s(self._feed.lanes))

    def make(
        self,
        step: Step,
        run_step: Callable[[Step], Done],
        waited_s: float,
        prepared_s: float,
    ) -> Done:
        """Make a step, given the seconds to wait for its batches and to copy them to the device."""
        batches, turn, number = step.batches, step.turn, step.number
        run = partial(run_step, step)
        if self._started is None:
            self._started = self._clock()
            self._first = number
        if not self.is_searching:
            if self.search.by_length is not None:
                self._use(self.search.by_length, batches)
            if number < self._look_at:
                return run()
            finish_device()  # the device may still run earlier steps
            began = self._clock()
            done = run()
            finish_device()
            seconds = self._clock() - began + prepared_s
            if self.is_pending:
                self._wait(seconds, batches, turn, number)
            else:
                self._look(seconds, batches, turn, number)
            return done
        settings = self._block.settings
        is_tried = settings != self.search.best
        if is_tried:
            self._moving.keep()
            why = self._objection(settings, batches) or self._ends_here(settings, run)
            if why:
                return self._again(run, turn, number, why)
        self._stepper.may_split = not (is_tried and self._world.size == 1)
        finish_device()
        began, used = self._clock(), self._cpu_clock()
        if isinstance(settings, ByLength):
            self._use(settings, batches)
        self._switching_s = self._clock() - began
        try:
            with self.search.marks.on(self._new_in(settings), "step"):
                done = run()
        except Exception as error:
            if self._stepper.may_split:
                raise
            why = failure(error)
            forget_frames(error)
            return self._again(run, turn, number, why)
        finally:
            self._stepper.may_split = True
        finish_device()
        seconds = self._clock() - began + prepared_s
        cpu_s = self._cpu_clock() - used if self._is_on_cpu else seconds
        if is_tried and turn.update.gated and turn.update.was_bad():
            return self._again(run, turn, number, "gave NaN")
        self._last = number
        self._stepped.add(settings)
        if is_tried and (without := self._without_graph(settings)):
            self._span(number, self.search.best)
            self._next(lambda: self._blocks.throw(Failed(without[1])), number)
            return done
        self._span(number, settings)
        self._waited.append(waited_s)
        self._count(seconds, cpu_s, batches, turn, number)
        return done

    def _objection(self, settings: Settings | ByLength, batches: Sequence[Batch]) -> str:
        search = self.search
        if isinstance(settings, ByLength) or not search.unchecked:
            return ""
        options = [one for one in search.unchecked if getattr(settings, one.setting) == one.value]
        if not options:
            return ""
        began = self._clock()
        with self._uncounted():
            own = search.check(options, settings, batches[0])
        why: str = next(filter(None, self._world.gather(own)), "")
        if why:
            search.budget.lost_s += self._clock() - began
        else:
            search.unchecked = [one for one in search.unchecked if one not in options]
            self._switched_s += self._clock() - began
        return why

    def _new_in(self, settings: Settings | ByLength) -> list[str]:
        search = self.search
        if isinstance(settings, ByLength) or settings in self._stepped:
            return []
        on, proven = (one.other_than(search.plain).items() for one in (settings, search.best))
        return [field for field, _ in (on - proven if proven <= on else on)]

    def _ends_here(self, settings: Settings | ByLength, run: Callable[[], Done]) -> str:
        fields = self._new_in(settings)
        if not fields:
            return ""
        # Compiling may start processes.
        may_fork = all(LIVE[field.partition(".")[2]].switches != "once" for field in fields)
        began, why = self._clock(), ""
        try:
            self.search.marks.check(fields, "step", run if may_fork else None)
        except EndsProcess as error:
            why = failure(error)
        self.search.budget.lost_s += self._clock() - began
        return why

    def _without_graph(self, settings: Settings | ByLength) -> tuple[str, str] | None:
        if isinstance(settings, ByLength):
            return None
        makers = {"capture": self._graphs.compiled, "cuda_graph": self._graphs.cuda}
        whys = {name: makes.why for name, makes in makers.items() if makes is not None}
        on = (name for name, why in whys.items() if why and getattr(settings, name) == "on")
        return next(((name, whys[name]) for name in on), None)

    def _again(self, run: Callable[[], Done], turn: Turn, number: int, why: str) -> Done:
        self._stepper.update.forget()
        turn.update.clear()
        self._moving.put_back()
        self._use(self.search.best)
        done = run()
        self._last = number
        self._span(number, self.search.best)
        self._next(lambda: self._blocks.throw(Failed(why)), number)
        return done

    def _span(self, number: int, settings: Settings | ByLength) -> None:
        if self.spans and self.spans[-1][2] == settings and self.spans[-1][1] == number - 1:
            self.spans[-1] = (self.spans[-1][0], number, settings)
        else:
            self.spans.append((number, number, settings))

    def _start(self) -> None:
        """Begin the search, or take over the result of an earlier run."""
        self.done = self.search.is_settled
        if self.done:
            self._use(self.search.best)
            self._started, self._first = self._clock(), self._last + 1
            self._look_at = self._last + self._look_every
        else:
            self._blocks = self.search.run()
            self._begin(next(self._blocks))

    # -- blocks ------------------------------------------------------------------------------

    def _begin(self, block: Block) -> None:
        self._block = block
        self._settled: list[TimedStep] = []
        self._counted: list[TimedStep] = []
        self._settled_cpu_s = self._counted_cpu_s = 0.0
        self._waited: list[float] = []
        self._switching_s = self._switched_between_s = 0.0
        began = self._clock()
        with self.search.marks.on(self._new_in(block.settings), "switch"):
            self._use(block.settings)
        self._switched_s = self._clock() - began
        self._faults = page_faults()

    def _use(self, settings: Settings | ByLength, batches: Sequence[Batch] = ()) -> None:
        if isinstance(settings, ByLength):
            if not batches:
                return
            settings = settings.at(_values(batches))
        if settings != self._stepper.switch.now:
            self._stepper.use(settings)
        self._feed.channels_last = settings.memory_format == "channels_last"

    def _count(
        self, seconds: float, cpu_s: float, batches: Sequence[Batch], turn: Turn, number: int
    ) -> None:
        if not self._is_of_kind(batches, turn):
            return
        values, split = _values(batches), self.search.tried_split
        if split is not None and split.at(values) == self.search.best:
            self._switched_between_s += self._switching_s
            return
        step = (values, seconds + self._switched_between_s)
        self._switched_between_s = 0.0
        if len(self._settled) < self._block.settle:
            self._settled.append(step)
            self._settled_cpu_s += cpu_s
            self._faults = page_faults()
            return
        self._counted.append(step)
        self._counted_cpu_s += cpu_s
        if len(self._counted) == self._block.steps:
            self._end(number)

    def _is_of_kind(self, batches: Sequence[Batch], turn: Turn) -> bool:
        is_alone = self._world.size == 1
        kind = (turn.number, sum(b.size if is_alone else b.whole for b in batches))
        if self._kind is None:
            self._kind = kind
        return bool(kind == self._kind)

    def _end(self, number: int) -> None:
        block, search, lengths = self._block, self.search, self.search.lengths
        lengths.add(block.settings, self._counted)
        settled_s = len(self._settled) * lengths.typical_s(self._settled) if self._settled else 0.0
        seconds = lengths.typical_s(self._counted)
        cpu_s = seconds * _share(self._counted_cpu_s, self._counted)
        settled_cpu_s = settled_s * _share(self._settled_cpu_s, self._settled)
        own = [
            seconds,
            block.steps * seconds + settled_s + self._switched_s,
            cpu_s,
            block.steps * cpu_s + settled_cpu_s + self._switched_s,
            (page_faults() - self._faults) / block.steps,
            self._clock() - (self._started or 0.0),
            float(lengths.varied),
            statistics.median(self._waited),
        ]
        of_slowest = map(max, zip(*self._world.gather(own), strict=True))
        seconds, total_s, cpu_s, total_cpu_s, faults, elapsed_s, varied, input_s = of_slowest
        search.budget.elapsed_s, search.budget.input_s = elapsed_s, input_s
        search.varied = bool(varied)
        steps, last = len(self._settled) + block.steps, number - self._first + 1
        done = BlockTimes(seconds, total_s, steps, last, faults, cpu_s, total_cpu_s)
        self._next(lambda: self._blocks.send(done), number)

    def _next(self, ask: Callable[[], Block], number: int) -> None:
        try:
            block = ask()
            while why := self._ended(block.settings):
                block = self._blocks.throw(Failed(why))
            self._begin(block)
        except StopIteration:
            self.done = True
            self._finish()

    def _ended(self, settings: Settings | ByLength) -> str:
        if isinstance(settings, ByLength) or settings in self._stepped:
            return ""
        return self.search.marks.objection(settings.other_than(self.search.plain))

    # -- the end -----------------------------------------------------------------------------

    def stop(self, why: str, *, suffices: bool = False) -> None:
        """End the search now, with the best settings known."""
        if self.beside is not None and self.beside.is_open:
            self.beside.drop(f"was not measured: {why} while it was compiled")
            self.why, self.of_capture = why, True
            self._settle(self)
            return
        if self.is_searching:
            self.why, self.suffices = why, suffices
            self._blocks.close()
            self._finish()

    def _finish(self) -> None:
        self._use(self.search.best)
        self._changed, self._is_of_graph, self._paces = 0, False, None
        self._trained = self._trainable()
        if self.beside is not None and not self.why:
            self.beside.judge()
        self._look_at = self._last + (1 if self.is_pending else self._look_every)
        self._settle(self)

    def back(self) -> None:
        """Switch to the settings that hold for all batch lengths, for an evaluation."""
        if not self.is_searching and self.search.by_length is not None:
            self._use(self.search.best)

    def stop_splitting(self) -> None:
        """Use the same settings for steps of all lengths from here on."""
        self.back()
        self.search.by_length = None

    def _wait(self, seconds: float, batches: Sequence[Batch], turn: Turn, number: int) -> None:
        assert self.beside is not None
        self._look_at = number + 1
        self._tell_the_time()
        if not self._is_of_kind(batches, turn):
            return
        if not self.beside.has_begun:
            with self.search.marks.on([CAPTURE], "look"):
                self.beside.begin(batches, number)
        else:
            self.beside.after(seconds, number)
        if self.beside.is_open:
            return
        if self.beside.is_there:
            self.of_capture = True
            self._resume(number, self.search.captured())
        else:
            self._look_at, self.of_capture = number + self._look_every, True
            self._settle(self)

    def _tell_the_time(self) -> None:
        if self._started is not None:
            self.search.budget.elapsed_s = self._clock() - self._started

    def _judge_again(self, number: int) -> None:
        if self.beside is not None and self.beside.waits:
            self._tell_the_time()
            self.beside.judge()
            if self.is_pending:
                self._look_at = number + 1

    def _part_with_graph(self) -> None:
        search = self.search
        if without := self._without_graph(search.best):
            name, why = without
            search.dropped[f"compute.{name}"] = why
            search.best = search.best.but(**{name: "off"})
            self._use(search.best)
            self._note(f"compute.{name}: steps run eagerly: {why}")
            self.of_capture = True
            self._settle(self)

    def _resume(self, number: int, blocks: Any) -> None:
        self.done, self.why, self._look_at = False, "", 0
        self.spans.append((self._last + 1, number, self.holds))
        self._last, self._blocks = number, blocks
        self._begin(next(blocks))

    def rest(self) -> None:
        """Time no steps until `wake`, because steps now differ from the measured ones."""
        self.stop_splitting()
        if self.is_pending:
            self.stop("features of frozen layers were kept")
        self._look_at = sys.maxsize

    def wake(self, last: int) -> None:
        """Time steps again; `last` is the number of the latest step."""
        if not self.is_searching:
            self._look_at = last + self._look_every

    def leave(self, plain: Mapping[str, Any], why: str, last: int) -> None:
        """Drop settings that were chosen, and never try them again."""
        search = self.search
        begun = self.spans[-1][1] + 1 if self.spans else 1
        if last >= begun:
            self.spans.append((begun, last, self.holds))
            self._last = last
        self.stop_splitting()
        search.options = [option for option in search.options if option.field not in plain]
        search.dropped |= dict.fromkeys(plain, why)
        search.best = search.best.but(**{f.partition(".")[2]: v for f, v in plain.items()})
        self._changed = 0

    def restart_numbers(self) -> None:
        """Forget the steps so far, which were not part of the run."""
        self.spans.clear()
        for trial in self.search.trials:
            trial["first"] = trial["last"] = 0
        self._look_at = _LOOK_EVERY

    def _trainable(self) -> int:
        return sum(p.requires_grad for p in self._stepper.switch.model.parameters())

    def _look(self, seconds: float, batches: Sequence[Batch], turn: Turn, number: int) -> None:
        self._look_at = number + self._look_every
        self._part_with_graph()
        search, values = self.search, _values(batches)
        known, split = search.step_s.get(search.best), search.by_length
        factor = 1.0
        # Steps under other settings than the best for all lengths have another pace.
        is_best = split is None or split.at(values) == search.best
        if known is not None and is_best and self._is_of_kind(batches, turn):
            factor = self._slower(search.lengths.typical_s([(values, seconds)]), known)
        is_other = self._trainable() != self._trained
        own = [factor, float(is_other)]
        factor, is_other = map(max, zip(*self._world.gather(own), strict=True))
        self._changed = self._changed + 1 if not 1 / _CHANGED < factor < _CHANGED else 0
        if self._changed or self._paces is not None:
            self._look_at = number + _LOOK_AGAIN
        if is_other:
            self._trained = self._trainable()
            self._changed_job()
        elif self._changed >= _LOOKS:
            self._note(f"auto: {_pace_words(factor)}: settings are tried once more")
            # On a machine whose load keeps changing, check less and less often.
            self._look_every *= 2
            self._kind, self.of_capture = None, False
            self._resume(number, self.search.again())
        else:
            self._judge_again(number)

    def _slower(self, seconds: float, known: float) -> float:
        capture, search = self._graphs.compiled, self.search
        if capture is not None and capture.is_asked and capture.compiling is not None:
            return 1.0  # the compiling child slows the steps for now
        is_of_graph = capture is not None and capture.is_asked and capture.is_used
        if is_of_graph != self._is_of_graph:
            self._is_of_graph, self._paces = is_of_graph, []
        if self._paces is None:
            return seconds / known
        self._paces.append(seconds)
        if len(self._paces) == _LOOKS:
            search.step_s[search.best] = search.budget.step_s = statistics.median(self._paces)
            self._paces = None
        return 1.0

    def begin_again(
        self, search: Search, settle: Callable[[Tuner], None], last: int, now: Settings
    ) -> None:
        """Tune for another job from the next step on."""
        self._trials = self._all_trials()
        self._dropped |= self.search.dropped
        budget = self.search.budget
        before, lost = self._spent
        self._spent = (before + budget.before_s + budget.rehearsed_s, lost + budget.lost_s)
        search.splits = self.search.splits
        self.search, self._settle = search, settle
        self._stepped.clear()
        self.of_capture = False
        self._captures, self.beside = self._all_captures(), None
        self.done, self.why, self.suffices, self._look_at = False, "", False, 0
        self._kind, self._started, self._look_every = None, None, _LOOK_EVERY
        self.follows(last, now)
        self._start()

    def follows(self, last: int, now: Settings) -> None:
        """Record that steps up to number `last` ran; steps without a span ran under `now`."""
        begun = self.spans[-1][1] + 1 if self.spans else 1
        if last >= begun:
            self.spans.append((begun, last, now))
        self.since = self._last = last

    def _all_trials(self) -> list[dict[str, Any]]:
        own = [
            {**one, "first": one["first"] + self.since, "last": one["last"] + self.since}
            for one in self.search.trials
        ]
        return [*self._trials, *own]

    def _all_captures(self) -> list[dict[str, Any]]:
        own = None if self.beside is None else self.beside.record()
        return self._captures if own is None else [*self._captures, own]

    def record(self, last: int) -> dict[str, Any]:
        """Return the record for History, as plain data."""
        search = self.search
        plain, seconds = search.plain, search.step_s
        earlier = {f: why for f, why in self._dropped.items() if not search.tells_of(f)}
        spans = [(a, b, settings.other_than(plain)) for a, b, settings in self.spans]
        begun = spans[-1][1] + 1 if spans else 1
        if last >= begun and not self.is_searching:
            spans.append((begun, last, self.holds.other_than(plain)))
        return {
            "done": self.done,
            "why": self.why,
            "before_first_step_s": self._spent[0]
            + search.budget.before_s
            + search.budget.rehearsed_s,
            "lost_s": self._spent[1] + search.budget.lost_s,
            "step_s": {"plain": seconds.get(plain), "chosen": seconds.get(search.best)},
            "spans": [{"first": a, "last": b, "settings": s} for a, b, s in spans],
            "trials": self._all_trials(),
            "dropped": {**earlier, **search.dropped},
            "captures": self._all_captures(),
        }


def _pace_words(factor: float) -> str:
    if factor >= 1:
        return f"steps take {rounded(factor)} times as long as they did"
    return f"steps are {rounded(1 / factor)} times as fast as they were"


def _values(batches: Sequence[Batch]) -> int:
    return sum(tensor.numel() for batch in batches for tensor in tensors_in(batch.inputs))


def _share(cpu_s: float, steps: Sequence[TimedStep]) -> float:
    return max(cpu_s, 1e-9) / max(sum(seconds for _, seconds in steps), 1e-9)
