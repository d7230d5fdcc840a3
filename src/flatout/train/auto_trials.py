"""The trials behind `auto`: real training steps under other settings, without a trace.

Blocks of steps run in the order A B B A on the user's model, optimiser and first batches; weights,
optimiser and random states are put back bit for bit at the end.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flatout.data.batch import Batch, split, to_memory_format
from flatout.measure import TrialResult, page_faults, run_trial
from flatout.models.keras_model import is_keras
from flatout.recipe import ModelFacts
from flatout.train.settings import Settings
from flatout.train.snapshot import Snapshot, random_state, set_random_state, untouched
from flatout.train.step import Compute, Stepper

# A plain step longer than this is measured on a part of the batch.
LONG_STEP_S = 0.3
# Large gains that do not depend on the size of the tensors show on a part of the batch as well.
QUICK_PART = 4
# A/A noise above which an answer holds for this run only.
NOISE = 0.2
# Sums of some thousand float32 products in another order differ by less than this share.
_ROUNDING = 1e-4
# A block of steps lasts at least this long, so that the clock and the switching do not show.
BLOCK_S = 0.04


@dataclass(frozen=True)
class Option:
    """A setting that may be faster.

    Attributes:
        field: its dotted name in the Recipe.
        setting: its name in Settings.
        value: the value in Settings that may be faster than the plain one.
        why: why it may be, for people.
        by_size: its gain comes from large tensors (memory traffic, page faults), so it has to be
            measured on the whole batch.
    """

    field: str
    setting: str
    value: Any
    why: str
    by_size: bool = True

    @property
    def in_recipe(self) -> str:
        """The value as the Recipe says it."""
        return "on" if self.value is True else str(self.value)


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
    """

    def __init__(
        self, stepper: Stepper, compute: Compute, batches: list[Batch], plain: Settings
    ) -> None:
        self.stepper = stepper
        self.compute = compute
        self.batches = batches
        self.plain = plain
        self.block_s = BLOCK_S
        self.results: dict[str, TrialResult] = {}
        self.together: TrialResult | None = None
        self.whole: TrialResult | None = None
        self._set: Settings | None = None
        self._part = 1
        self._rejected: dict[str, str] = {}
        self._faults = (0, 0)
        self._seen: dict[tuple[Settings, int], float] = {}

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Afterwards model, optimiser and random states are as before, under plain settings."""
        snapshot = Snapshot(self.stepper.switch.model, self.stepper.switch.optimizers)
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
                self.stepper.look(self.batches[0], self._forward)
                drawn = not torch.equal(torch.get_rng_state(), before)
        finally:
            for handle in handles:
                handle.remove()
        # Random numbers drawn outside of the modules that were watched may fall anywhere.
        by_layout = any(on_images) or (drawn and not dropouts)
        return replace(facts, draws_random=facts.draws_random or drawn, draws_by_layout=by_layout)

    def _forward(self, pieces: list[Batch]) -> None:
        for piece in pieces:
            self.compute(piece)

    def works(self, option: Option) -> bool:
        """Whether a step under this option runs, is finite and, for a rewrite, has its parity."""
        if option.setting == "allocator":
            return True  # trying it would be using it: it cannot be undone
        settings = self.plain.but(**{option.setting: option.value})
        try:
            if option.setting == "rewrites" and not self._same_gradients(settings):
                self._rejected[option.field] = "would change the result"
                return False
            self._run(settings, part=max(1, self.batches[0].size // 16))
        except Exception as error:
            self._rejected[option.field] = f"fails here: {str(error).splitlines()[0]}"
            return False
        if self.stepper.update.was_bad():
            self.stepper.update.clear()
            self._rejected[option.field] = "gave NaN"
            return False
        return True

    def _same_gradients(self, settings: Settings) -> bool:
        batch = _head(self.batches[0], 16)
        found = []
        before = random_state()
        for wanted in (self.plain, settings):
            self.stepper.use(wanted)
            set_random_state(before)
            self.stepper.update.begin()
            value = self.compute(batch)
            loss = value[0] if isinstance(value, tuple) else value
            loss.backward()  # type: ignore[no-untyped-call]
            found.append([loss.detach(), *(p.grad for p in self.stepper.update.parameters)])
            self.stepper.update.forget()
        plain, rewritten = found
        same = _nearly if is_keras(self.stepper.switch.model) else torch.equal
        return all(
            (a is None and b is None) or (a is not None and b is not None and same(a, b))
            for a, b in zip(plain, rewritten, strict=True)
        )

    # -- measuring ---------------------------------------------------------------------------

    def first_step(self) -> float | None:
        """Seconds of a plain step on the whole batch; None where it fails.

        From now on long steps run on a part of the batch.
        """
        try:
            self._block(self.plain, 1)
            seconds = self._block(self.plain, 1)
        except Exception:
            return None
        while seconds / self._part > LONG_STEP_S and self._part * 2 <= self.batches[0].size:
            self._part *= 2
        return seconds

    def without_losers(self, options: list[Option], deadline: float) -> Settings:
        """All options, without those that are measured and are not faster.

        Options that there is no time to measure alone stay if the whole set was measured faster.
        """
        best = self.plain.but(**{option.setting: option.value for option in options})
        rest = [option for option in options if option.setting != "allocator"]
        if len(rest) < len(options):
            best = self._without_useless_allocator(best)
        if rest:
            self.together = self._decisive_trial(self.plain, best, deadline)
            self._set = best
        won_together = self.together is not None and is_faster(self.together)
        for option in rest:
            without = best.but(**{option.setting: getattr(self.plain, option.setting)})
            trial = None if option.by_size else self._quick_trial(without, best, deadline)
            if trial is None or not is_faster(trial):
                # A quick look that shows nothing decides nothing.
                trial = self.trial(without, best, deadline)
            if trial is not None:
                self.results[option.field] = trial
            keep = won_together if trial is None else is_faster(trial)
            best = best if keep else without
        return best

    def _without_useless_allocator(self, best: Settings) -> Settings:
        """Blocks A A A A, then B B B B: glibc's own adaptive limits do not come back once set.

        What makes up for the missing interleaving is the count of page faults.
        """
        without = best.but(allocator=self.plain.allocator)
        self._run(without)
        before, faults = [self._run(without) for _ in range(4)], self._faults_of(without)
        after = [self._run(best) for _ in range(4)]
        self._faults = (faults, self._faults_of(best))
        a, b = iter(before), iter(after)
        trial = run_trial(lambda: next(a), lambda: next(b), max_pairs=2)
        self.results["memory.allocator"] = trial
        return best if is_faster(trial) else without

    def _faults_of(self, settings: Settings) -> int:
        """Page faults of one step."""
        self.stepper.use(settings)
        before = page_faults()
        self._time(self.batches, 1)
        return page_faults() - before

    def confirmed(self, best: Settings, deadline: float) -> Settings:
        """`best`, if as a whole it wins against plain; else plain."""
        if best == self.plain:
            return best
        if best == self._set and self.together is not None and is_faster(self.together):
            self.whole = self.together
            return best
        self.whole = self._decisive_trial(self.plain, best, deadline)
        if is_faster(self.whole):
            return best
        self.whole = None
        return self.plain

    def compiled(self, best: Settings) -> tuple[float, TrialResult]:
        """Seconds that compiling takes, and the trial of compiled steps against `best`."""
        compiled = best.but(compile=True)
        began = time.perf_counter()
        self._run(compiled)
        took = time.perf_counter() - began
        return took, self._decisive_trial(best, compiled, math.inf)

    def trial(
        self, a: Settings, b: Settings, deadline: float, most: int = 4, part: int | None = None
    ) -> TrialResult | None:
        """A against B in the time that is left; None where not even one round fits."""
        part = self._part if part is None else part
        left = deadline - time.perf_counter()
        # Four blocks of two steps; a setting not seen yet takes what plain takes, more or less.
        usual = self._seen[self.plain, 1] / part
        if 4 * (self._seen.get((a, part), usual) + self._seen.get((b, part), usual)) > left:
            return None
        return run_trial(
            lambda: self._run(a, part),
            lambda: self._run(b, part),
            max_pairs=most,
            min_pairs=min(2, most),
            deadline_s=left,
        )

    def _quick_trial(self, a: Settings, b: Settings, deadline: float) -> TrialResult | None:
        """One or two rounds on a part of the batch, for differences too large to miss."""
        part = self._part * QUICK_PART
        if self.batches[0].size < 16 * part:
            return None
        return self.trial(a, b, deadline, most=2, part=part)

    def _decisive_trial(self, a: Settings, b: Settings, deadline: float) -> TrialResult:
        """One round, whatever time is left; if that is not enough, more in the time that is."""
        trial = self.trial(a, b, math.inf, most=1)
        assert trial is not None
        if is_faster(trial):
            return trial
        return self.trial(a, b, deadline, most=3) or trial

    def _run(self, settings: Settings, part: int | None = None) -> float:
        """Seconds per step of one block under `settings`, after one step to settle."""
        return self._block(settings, self._part if part is None else part)

    def _block(self, settings: Settings, part: int) -> float:
        self.stepper.use(settings)
        batches = self.batches
        if part > 1:
            batches = [_head(b, max(1, b.size // part)) for b in batches]
        if settings.memory_format == "channels_last":
            batches = [to_memory_format(b, torch.channels_last) for b in batches]
        first = self._time(batches, 1)
        least = 1 if first > 2 * self.block_s else 2
        count = max(least, min(200, round(self.block_s / max(first, 1e-6))))
        seconds = self._time(batches, count) / count
        self._seen[settings, part] = seconds
        return seconds

    def _time(self, batches: list[Batch], count: int) -> float:
        began = time.perf_counter()
        for number in range(count):
            self.stepper(self.compute, (batches[number % len(batches)],), 0)
        if self.stepper.switch.device.type == "cuda":
            torch.cuda.synchronize(self.stepper.switch.device)
        return time.perf_counter() - began

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
            return f"{option.why}; measured together with the others"
        return option.why + self._on_part()

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


def _head(batch: Batch, size: int) -> Batch:
    return split(batch, max(1, -(-batch.size // size)))[0]
