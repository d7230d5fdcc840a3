"""The trials behind `auto`: real training steps under other settings, without a trace.

Blocks of steps run in the order A B B A on the user's model, optimizer and first batches; weights,
optimizer and random states are put back bit for bit at the end.

Each piece of work begins only where the Budget pays for what it costs at most: what it took before,
or a bound by what smaller pieces took. A few samples come first, then four times as many each time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flatout.console import first_line
from flatout.data import Batch
from flatout.errors import OutOfMemory
from flatout.measure import OutOfTime, TrialResult, page_faults, run_trial
from flatout.models import adapter_of
from flatout.recipe import ModelFacts, Trial
from flatout.train import auto_budget
from flatout.train.auto_budget import Budget
from flatout.train.settings import Settings
from flatout.train.snapshot import (
    Snapshot,
    bytes_kept,
    random_state,
    set_random_state,
    untouched,
)
from flatout.train.step import Compute, Stepper

# A plain step longer than this is measured on a part of the batch.
LONG_STEP_S = 0.3
# Large gains that do not depend on the size of the tensors show on a part of the batch as well.
QUICK_PART = 4
# A/A noise above which an answer holds for this run only.
NOISE = 0.2
# Sums of some thousand float32 products in another order differ by less than this share.
_ROUNDING = 1e-4
# The first look is at this part of a batch; each next one at this many times as many samples.
_FIRST_PART = 16
_GROWTH = 4
# A step takes at most so many times its forward pass, the update apart.
_FORWARDS = 4
# Fewer samples tell little of a batch.
_FEWEST_SAMPLES = 8
# A decision takes so many steps, and may leave a run that is so many times shorter.
_DECISION = 12
_HOPED = 8
# And a step under settings that were not seen yet, so many times a plain one.
_UNSEEN = 2
# Bytes of weights and optimizer state that are at least copied, or updated, in a second.
_BYTES_S = 1e9
# A block of steps lasts at least this long, so that the clock and the switching do not show.
BLOCK_S = 0.04


@dataclass(frozen=True)
class Option:
    """A setting that may be faster.

    Attributes:
        field: its dotted name in the Recipe.
        trial: of another value than the plain one.
    """

    field: str
    trial: Trial

    @property
    def setting(self) -> str:
        """Its name in Settings."""
        return self.field.partition(".")[2]


def is_faster(trial: TrialResult) -> bool:
    """Whether B won; a difference of half and more shows in a single round of four blocks."""
    return trial.wins or (trial.pairs == 1 and trial.ratio > 1.5 + 3 * trial.floor)


class Trials:
    """Trials on one job.

    Args:
        stepper: runs the steps.
        compute: forward and loss of a batch.
        batches: a few, on the device.
        plain: the settings to start from.
        budget: what all of it may take.

    Attributes:
        proven: settings that were measured faster than plain, or plain.
        whole: the trial in which they were.
        stopped: whether the time was up before all was tried.
    """

    def __init__(
        self,
        stepper: Stepper,
        compute: Compute,
        batches: list[Batch],
        plain: Settings,
        budget: Budget,
    ) -> None:
        self.stepper = stepper
        self.compute = compute
        self.batches = batches
        self.plain = plain
        self.budget = budget
        self.block_s = BLOCK_S
        self.results: dict[str, TrialResult] = {}
        self.together: TrialResult | None = None
        self.proven = plain
        self.whole: TrialResult | None = None
        self.stopped = False
        self._part = 1
        self._few = _head(batches[0], _FIRST_PART)
        self._forward_s = 0.0  # of these few samples
        self._rejected: dict[str, str] = {}
        self._faults = (0, 0)
        self._seen: dict[tuple[Settings, int], float] = {}
        self._costs: dict[tuple[Settings, int], float] = {}

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Afterwards model, optimizer and random states are as before, under plain settings.

        Raises:
            OutOfTime: copying them would take too long.
        """
        model, optimizers = self.stepper.switch.model, self.stepper.switch.optimizers
        kept = bytes_kept(model, optimizers)
        self.budget.require(3 * kept / _BYTES_S)
        began = self.budget.clock()
        snapshot = Snapshot(model, optimizers)
        # Putting back copies twice, and the optimizer's state may be there by then.
        self.budget.kept_s = max(3 * (self.budget.clock() - began), kept / _BYTES_S)
        try:
            yield
        finally:
            self.stepper.use(self.plain)
            snapshot.restore()
            self.stepper.use(self.plain)
            self.stepper.update.clear()

    # -- looking -----------------------------------------------------------------------------

    def facts(self, facts: ModelFacts) -> ModelFacts:
        """`facts` with what only a forward pass shows: whether and how random numbers are drawn."""
        on_images: list[bool] = []

        def watch(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            on_images.append(torch.is_tensor(inputs[0]) and inputs[0].dim() >= 4)

        model = self.stepper.switch.model
        dropouts = [m for m in model.modules() if type(m) is nn.Dropout and m.p > 0]
        handles = [m.register_forward_pre_hook(watch) for m in dropouts]
        before = torch.get_rng_state()
        try:
            with untouched(model), torch.no_grad():
                try:
                    self.stepper.look(self._few, self._compute)
                except OutOfMemory:
                    raise
                except Exception:
                    # A model may take batches of one size only.
                    self._few = self.batches[0]
                    self.stepper.look(self._few, self._compute)
                drawn = not torch.equal(torch.get_rng_state(), before)
        finally:
            for handle in handles:
                handle.remove()
        # Random numbers drawn outside of the modules that were watched may fall anywhere.
        by_layout = any(on_images) or (drawn and not dropouts)
        return replace(facts, draws_random=facts.draws_random or drawn, draws_by_layout=by_layout)

    def _compute(self, pieces: list[Batch]) -> None:
        for piece in pieces:
            self.compute(piece)

    def works(self, option: Option) -> bool:
        """Whether a step under this option runs, is finite and, for a rewrite, has its parity.

        Raises:
            OutOfTime: there is no time to find out.
        """
        if option.setting == "allocator":
            return True  # trying it would be using it: it cannot be undone
        settings = self.plain.but(**{option.setting: option.trial.value})
        step = _FORWARDS * self._forward_s
        try:
            if option.setting == "rewrites":
                self.budget.require(2 * step)
                if not self._same_gradients(settings):
                    self._rejected[option.field] = "would change the result"
                    return False
            self.budget.require(_UNSEEN * step)
            self.stepper.use(settings)
            self._time([self._laid_out(self._few, settings)], 1)
        except OutOfTime:
            raise
        except Exception as error:
            self._rejected[option.field] = f"fails here: {first_line(error)}"
            return False
        if self.stepper.update.was_bad():
            self.stepper.update.clear()
            self._rejected[option.field] = "gave NaN"
            return False
        return True

    def _same_gradients(self, settings: Settings) -> bool:
        found = []
        before = random_state()
        for wanted in (self.plain, settings):
            self.stepper.use(wanted)
            set_random_state(before)
            self.stepper.update.begin()
            value = self.compute(self._few)
            loss = value[0] if isinstance(value, tuple) else value
            loss.backward()  # type: ignore[no-untyped-call]
            found.append([loss.detach(), *(p.grad for p in self.stepper.update.parameters)])
            self.stepper.update.forget()
        plain, rewritten = found
        same = _nearly if adapter_of(self.stepper.switch.model).rewrites_round else torch.equal
        return all(
            (a is None and b is None) or (a is not None and b is not None and same(a, b))
            for a, b in zip(plain, rewritten, strict=True)
        )

    # -- measuring ---------------------------------------------------------------------------

    def first_pass(self) -> None:
        """Time the forward pass: on a few samples, then on more, up to the whole batch.

        From now on the budget knows what a step takes at least.

        Raises:
            OutOfTime: a forward pass on more samples may take too long.
        """
        batch, whole = self._few, self.batches[0]
        self._forward_s = self.budget.step_s = seconds = self._forward(batch)
        while batch.size < whole.size:
            more = _head(whole, max(1, whole.size // (_GROWTH * batch.size)))
            self.budget.require(seconds * more.size / batch.size)
            batch, seconds = more, self._forward(more)
            self.budget.step_s = max(self.budget.step_s, seconds)

    def _forward(self, batch: Batch) -> float:
        with untouched(self.stepper.switch.model), torch.no_grad():
            began = self.budget.clock()
            self.stepper.look(batch, self._compute)
            self._wait()
            return self.budget.clock() - began

    def first_step(self) -> float | None:
        """About the seconds of a plain step on the whole batch; None where it fails.

        It is run on the part of the batch that trials will run on.

        Raises:
            OutOfTime: two steps may take too long.
        """
        switch, self._part = self.stepper.switch, self._affordable_part()
        update = 3 * bytes_kept(switch.model, switch.optimizers) / _BYTES_S
        whole = self.budget.step_s
        batches = [_head(batch, self._part) for batch in self.batches]
        self.budget.require(whole)
        forward = whole if self._part == 1 else min(whole, self._forward(batches[0]))
        at_most = _FORWARDS * forward + update
        self.stepper.use(self.plain)
        try:
            self.budget.require(at_most)
            cold = self._time(batches, 1)
            self.budget.require(min(cold, at_most))
            seconds = min(cold, self._time(batches, 1))
        except OutOfTime:
            raise
        except Exception:
            return None
        # The whole batch takes longer by what its forward pass does.
        self.budget.step_s = seconds * max(1.0, whole / max(forward, 1e-9))
        self._seen[self.plain, self._part] = seconds
        self._seen[self.plain, 1] = self.budget.step_s
        while self.budget.step_s / self._part > LONG_STEP_S and self._can_halve(self._part):
            self._part *= 2
        return self.budget.step_s

    def _affordable_part(self) -> int:
        """A part of the batch on which a decision repays itself even in a much shorter run.

        Raises:
            OutOfTime: there is none.
        """
        steps, part = self.budget.steps, 1
        if steps is None:
            return part
        while _DECISION / part > auto_budget.SHARE * steps / _HOPED:
            if not self._can_halve(part):
                raise OutOfTime
            part *= 2
        return part

    def _can_halve(self, part: int) -> bool:
        return part < _FIRST_PART and self.batches[0].size // (2 * part) >= _FEWEST_SAMPLES

    @property
    def round_s(self) -> float:
        """What the first trial takes: four blocks of two steps."""
        return 8 * self._at_most(self.plain, self._part)

    def decide(self, options: list[Option], open_threads: bool) -> Settings:
        """The settings that were measured faster than plain, in the time that there is."""
        self.block_s = min(BLOCK_S, self.budget.left_s / 50)
        try:
            best = self._without_losers([option for option in options if self.works(option)])
            # Few samples run faster on one thread than many.
            if open_threads and self.plain.threads > 1 and self._part == 1:
                best = self._threads(best)
            if best not in (self.plain, self.proven):
                trial = self._decisive_trial(self.plain, best)
                # If that does not win, plain it is.
                self._prove(*((best, trial) if is_faster(trial) else (self.plain, None)))
            elif best == self.plain:
                self._prove(self.plain, None)
        except OutOfTime:
            self.stopped = True  # what was proven by then holds
        return self.proven

    def _prove(self, settings: Settings, trial: TrialResult | None) -> None:
        self.proven, self.whole = settings, trial

    def _without_losers(self, options: list[Option]) -> Settings:
        """All options, without those that are measured and are not faster.

        Options that there is no time to measure alone stay if the whole set was measured faster.
        """
        best = self.plain.but(**{option.setting: option.trial.value for option in options})
        rest = [option for option in options if option.setting != "allocator"]
        if len(rest) < len(options):
            best = self._without_useless_allocator(best, bool(rest))
        if rest:
            self.together = self._decisive_trial(self.plain, best)
        won_together = self.together is not None and is_faster(self.together)
        if won_together:
            self._prove(best, self.together)
        for option in rest:
            without = best.but(**{option.setting: getattr(self.plain, option.setting)})
            # What is left has to be confirmed against plain.
            confirming = self._round_s(self.plain, best)
            trial = None if option.trial.by_size else self._quick_trial(without, best, confirming)
            if trial is None or not is_faster(trial):
                # A quick look that shows nothing decides nothing.
                trial = self.trial(without, best, confirming)
            if trial is not None:
                self.results[option.field] = trial
            keep = won_together if trial is None else is_faster(trial)
            best = best if keep else without
        return best

    def _threads(self, best: Settings) -> Settings:
        """`best`, on one thread if that is faster."""
        one = best.but(threads=1)
        trial = self.trial(best, one, self._round_s(self.plain, one))
        if trial is None:
            return best
        self.results["process.threads"] = trial
        return one if is_faster(trial) else best

    def _without_useless_allocator(self, best: Settings, others: bool) -> Settings:
        """Blocks A A A A, then B B B B: glibc's own adaptive limits do not come back once set.

        What makes up for the missing interleaving is the count of page faults. Where there are
        `others` to try, they come first if there is no time for both.
        """
        without = best.but(allocator=self.plain.allocator)
        cost = 9 * self._cost(without, self._part) + 2 * self._at_most(without, self._part)
        if not self.budget.pays_for(cost + others * self._round_s(self.plain, best)):
            self._rejected["memory.allocator"] = "was not measured: there was no time"
            return without
        self._run(without)
        before, faults = [self._run(without) for _ in range(4)], self._faults_of(without)
        after = [self._run(best) for _ in range(4)]
        self._faults = (faults, self._faults_of(best))
        a, b = iter(before), iter(after)
        trial = run_trial(lambda: next(a), lambda: next(b), max_pairs=2)
        self.results["memory.allocator"] = trial
        if not is_faster(trial):
            return without
        if not others:
            self._prove(best, trial)
        return best

    def _faults_of(self, settings: Settings) -> int:
        """Page faults of one step."""
        self.budget.require(self._at_most(settings, self._part))
        self.stepper.use(settings)
        batch = self._laid_out(_head(self.batches[0], self._part), settings)
        before = page_faults()
        self._time([batch], 1)
        return page_faults() - before

    def compiled(self, best: Settings) -> tuple[float, TrialResult]:
        """Seconds that compiling takes, and the trial of compiled steps against `best`.

        Raises:
            OutOfTime: there is no time for the trial.
        """
        compiled = best.but(compile="on")
        began = self.budget.clock()
        self.stepper.use(compiled)
        self.stepper(self.compute, (self.batches[0],), 0)
        self._wait()
        took = self.budget.clock() - began
        return took, self._decisive_trial(best, compiled)

    def trial(
        self, a: Settings, b: Settings, kept_s: float = 0.0, most: int = 4, part: int | None = None
    ) -> TrialResult | None:
        """A against B in the time that is left but for `kept_s`; None where no round fits."""
        part = self._part if part is None else part
        if not self.budget.pays_for(kept_s + self._round_s(a, b, part)):
            return None
        found = run_trial(
            lambda: self._run(a, part),
            lambda: self._run(b, part),
            max_pairs=most,
            min_pairs=min(2, most),
            deadline_s=self.budget.left_s - kept_s,
            clock=self.budget.clock,
        )
        plain = self._seen.get((self.plain, part))
        if plain is not None:
            # The run may become this much shorter, and measuring with it.
            share = min(found.a_median, found.b_median) / plain
            self.budget.step_s = min(self.budget.step_s, share * self._seen[self.plain, 1])
        return found

    def _quick_trial(self, a: Settings, b: Settings, kept_s: float) -> TrialResult | None:
        """One or two rounds on a part of the batch, for differences too large to miss."""
        part = self._part * QUICK_PART
        if self.batches[0].size < 16 * part:
            return None
        return self.trial(a, b, kept_s, most=2, part=part)

    def _decisive_trial(self, a: Settings, b: Settings) -> TrialResult:
        """One round; if that is not enough, more in the time that is left."""
        trial = self.trial(a, b, most=1)
        if trial is None:
            raise OutOfTime
        if is_faster(trial):
            return trial
        return self.trial(a, b, most=3) or trial

    def _round_s(self, a: Settings, b: Settings, part: int | None = None) -> float:
        """What a round A B B A takes at most."""
        part = self._part if part is None else part
        return 2 * (self._cost(a, part) + self._cost(b, part))

    def _cost(self, settings: Settings, part: int) -> float:
        """What a block takes at most: a step to settle, and those that count."""
        step = self._at_most(settings, part)
        return self._costs.get((settings, part), step + max(step, self.block_s))

    def _at_most(self, settings: Settings, part: int) -> float:
        """What a step takes at most, by what was seen."""
        plain = self._seen.get((self.plain, part), self._seen[self.plain, 1] / part)
        unseen = plain if settings == self.plain else _UNSEEN * plain
        return self._seen.get((settings, part), unseen)

    def _run(self, settings: Settings, part: int | None = None) -> float:
        """Seconds per step of one block under `settings`, after one step to settle.

        Raises:
            OutOfTime: there is no time for it.
        """
        part = self._part if part is None else part
        self.budget.require(2 * self._at_most(settings, part))
        began = self.budget.clock()
        self.stepper.use(settings)
        batches = [self._laid_out(_head(b, part), settings) for b in self.batches]
        first = self._time(batches, 1)
        self.budget.require(first)
        least = 1 if first > 2 * self.block_s else 2
        count = max(least, min(200, round(self.block_s / max(first, 1e-6))))
        seconds = self._time(batches, count) / count
        self._seen[settings, part] = seconds
        self._costs[settings, part] = self.budget.clock() - began
        return seconds

    def _time(self, batches: list[Batch], count: int) -> float:
        """Seconds of so many steps; on a CPU the time is looked at before each but the first."""
        began = self.budget.clock()
        for number in range(count):
            if number:
                self.budget.require(0)
            self.stepper(self.compute, (batches[number % len(batches)],), 0)
        self._wait()
        return self.budget.clock() - began

    def _wait(self) -> None:
        if self.stepper.switch.device.type == "cuda":
            torch.cuda.synchronize(self.stepper.switch.device)

    def _laid_out(self, batch: Batch, settings: Settings) -> Batch:
        if settings.memory_format == "channels_last":
            return batch.to_memory_format(torch.channels_last)
        return batch

    @property
    def disturbed(self) -> bool:
        """Whether other work on this machine made the measurements too coarse to keep."""
        done = [*self.results.values(), *filter(None, (self.together, self.whole))]
        return bool(done) and statistics.median(trial.floor for trial in done) > NOISE

    # -- words -------------------------------------------------------------------------------

    def evidence(self, option: Option) -> str:
        """Why a chosen option is there."""
        if option.setting == "allocator":
            return "page faults a step: {:,} before, {:,} after".format(*self._faults)
        if option.field not in self.results:
            return f"{option.trial.why}; measured together with the others{self._on_part()}"
        return option.trial.why + self._on_part()

    def objection(self, option: Option) -> str:
        """Why an option is not chosen."""
        if option.field in self._rejected:
            return self._rejected[option.field]
        trial = self.results.get(option.field)
        if trial is None:
            return "was not measured faster"
        if is_faster(trial):
            return f"measured {trial.words}, but all choices together are not faster than plain"
        return f"measured {trial.words}: not faster{self._on_part()}"

    def _on_part(self) -> str:
        return f", on 1/{self._part} of the batch" if self._part > 1 else ""


def _nearly(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two gradients differ by rounding only, measured by the larger elements."""
    scale = float(a.abs().max()) if a.numel() else 0.0
    return a.shape == b.shape and bool((a - b).abs().max() <= _ROUNDING * scale + 1e-12)


def _head(batch: Batch, part: int) -> Batch:
    """The first samples of a batch, about that part of it; two at least, if there are two."""
    return batch.split(max(1, min(part, batch.size // 2)))[0]
