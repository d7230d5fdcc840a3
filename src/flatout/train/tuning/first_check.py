"""Checks before the first step whether each option of `auto` runs and computes the same.

The checks are forward and backward passes of a few samples, without an update. Weights, optimizer
state and random states are left unchanged. All other measurements use the job's own steps.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from flatout.data import Batch, same_state
from flatout.errors import OutOfMemory
from flatout.measure import finish_device
from flatout.models import adapter_of, before_compiled
from flatout.optim import seconds_of_update
from flatout.recipe import ModelFacts, Parity, of_change
from flatout.train.gradients import Gradients, are_equal, difference, is_finite, summed
from flatout.train.losses.loss_value import Compute
from flatout.train.part import Step
from flatout.train.settings import LIVE, Settings
from flatout.train.snapshot import Moving, random_state, set_random_state, untouched
from flatout.train.step import Stepper
from flatout.train.tables.row_tables import Tables
from flatout.train.tuning.budget import Budget
from flatout.train.tuning.crash_markers import Marks, failure
from flatout.train.tuning.search import Option, is_slow

# _PART: a check runs on one _PART-th of a batch. _FEWEST: minimum number of samples in a check.
# _FEWEST_LONG: minimum number of samples if a step is long.
_PART, _FEWEST, _FEWEST_LONG = 16, 4, 2
_WITHOUT_COMPILING = partial(torch.compiler.set_stance, "fail_on_recompile")
# Maximum difference of gradients, as a fraction of their norm, that counts as rounding. _ROUNDING:
# for sums of some thousand products in another order. _HALF_ROUNDING: for bf16, whose numbers have
# 8 bits.
_ROUNDING, _HALF_ROUNDING = 0.01, 0.5
# Seconds of a forward pass above which it is timed only once, although a first pass is slower.
_LONG_S = 0.5
# Approximate ratio of the time of a step to the time of a forward pass.
_FORWARDS = 3
# Maximum expected ratio of the time of a first pass under new settings to that of later passes.
_OF_FIRST = 2.0
# Differences up to this multiple of the plain gradients' own rounding error count as rounding.
_AS_PLAIN = 2.0

T = TypeVar("T")


class KnownStep(NamedTuple):
    """Measurements that exist before a step is checked.

    Attributes:
        looked_s: seconds of an earlier forward pass of the first batch; 0 if there was none.
        batch_s: seconds that the input pipeline took to make a batch.
        batches: number of batches in a step.
    """

    looked_s: float = 0.0
    batch_s: float = 0.0
    batches: int = 1


NOTHING_KNOWN = KnownStep()


class PassTimes(NamedTuple):
    """Seconds of a forward and a backward.

    Attributes:
        wall_s: seconds of wall time.
        cpu_s: seconds of CPU time of this process on all CPUs; on a GPU the same as `wall_s`.
    """

    wall_s: float
    cpu_s: float

    def least(self, other: PassTimes) -> PassTimes:
        """Return the smaller of both wall times, and the smaller of both CPU times."""
        return PassTimes(min(self.wall_s, other.wall_s), min(self.cpu_s, other.cpu_s))

    def over(self, plain: PassTimes) -> float:
        """Return the ratio of these times to the times under plain settings.

        Other work on the machine can make any pass slow by the clock. A pass that is slow by itself
        also takes more CPU time.
        """
        return min(self.wall_s / plain.wall_s, self.cpu_s / plain.cpu_s)


class FirstCheck:
    """A check that runs a few samples, and compares results and times with plain settings.

    Attributes:
        compute, plain, budget: the forward and loss of a batch, the plain settings, and the time
            budget.
        dropped: fields that cannot be used, with the reasons.
        slower: by field, the factor by which the few samples took longer; under "together", the
            factor for all fields at once, or for `fastest`.
        fastest: the fields of the options under which the few samples took least time. None if
            steps are short enough to be measured instead.
        unchecked: options that were not checked for lack of time, alone or together. `of_step`
            checks them.
        few_s: seconds of the few samples under plain settings; None if they were not timed.
        starts_cold: True if the time of a first pass does not predict the next pass.
    """

    def __init__(
        self,
        stepper: Stepper,
        compute: Compute,
        batch: Batch,
        plain: Settings,
        budget: Budget,
        marks: Marks | None = None,
    ) -> None:
        self._stepper, self.compute, self.plain = stepper, compute, plain
        self.budget, terms = budget, budget.terms
        self._clock, self._cpu_clock = terms.clock, terms.cpu_clock
        self._far_slower = terms.few_far_slower
        self.marks = marks or Marks()
        self._whole = batch
        self._few = batch.first(max(min(_FEWEST, batch.size), batch.size // _PART))
        self.dropped: dict[str, str] = {}
        self.slower: dict[str, float] = {}
        self.fastest: frozenset[str] | None = None
        self.unchecked: list[Option] = []
        self._looks: dict[frozenset[str], float] = {frozenset(): 1.0}
        self.few_s: float | None = None
        self.starts_cold = terms.starts_cold(stepper.switch.device)
        self._rounding: float | None = None
        self._loading_s = 0.0  # seconds that plain passes took to load kernels
        self._first_s = 0.0  # seconds of the first forward of the few samples
        self._sample_s = 0.0  # seconds of the plain forward per sample, in a small batch
        self._pass_s = 0.0  # approximate seconds of forward and backward of the whole batch
        self._moving: list[torch.Tensor] = []  # weights that a forward itself changes

    def facts(self, facts: ModelFacts) -> ModelFacts:
        """Return `facts`, completed by facts about the random draws of a forward pass."""
        on_images: list[bool] = []

        def watch(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            on_images.append(torch.is_tensor(inputs[0]) and inputs[0].dim() >= 4)

        model = self._stepper.switch.model
        dropouts = [m for m in model.modules() if type(m) is nn.Dropout and m.p > 0]
        handles = [m.register_forward_pre_hook(watch) for m in dropouts]
        before = random_state()
        try:
            with untouched(model, self.compute) as held, self._stepper.forward_alone():
                if not self._takes_few():
                    self._few = self._whole
                    self._first_s = self._forward_of(self._few)
                elif self._is_slow(_FORWARDS * self._first_s) and self._few.size > _FEWEST_LONG:
                    fewer = self._few.first(_FEWEST_LONG)
                    self._few = fewer if self._takes(fewer) else self._few
                drawn = not same_state(before, random_state())
                self._moving = held.moved_weights()
        finally:
            for handle in handles:
                handle.remove()
        # Random numbers drawn outside of the watched modules may depend on the memory layout.
        by_layout = any(on_images) or (drawn and not dropouts)
        return replace(facts, draws_random=facts.draws_random or drawn, draws_by_layout=by_layout)

    def _takes_few(self) -> bool:
        """Return whether the model accepts a few samples of the batch in place of the whole batch.

        Compiled code would compile again for a few samples, and then round differently. So the
        whole batch is compiled first.
        """
        if "torch._dynamo" not in sys.modules:  # nothing is compiled
            return self._takes(self._few)
        with before_compiled() as compiles, _WITHOUT_COMPILING():
            takes = self._takes(self._few)
        if takes or not compiles():
            return takes
        self._forward_of(self._whole)
        with _WITHOUT_COMPILING():
            return self._takes(self._few)

    def _takes(self, batch: Batch) -> bool:
        """Return whether the model accepts this batch: some models accept only one batch size."""
        try:
            self._first_s = self._forward_of(batch)
        except OutOfMemory:
            raise
        except Exception:
            return False
        return True

    def _forward_of(self, batch: Batch) -> float:
        return self._timed(partial(self._stepper.look, batch, self._run))

    def _run(self, pieces: list[Batch]) -> None:
        for piece in pieces:
            self.compute(piece)

    def time_step(self, known: KnownStep) -> None:
        """Set the budget's estimates of a step's time and of the time to make its input.

        The passes are timed by a forward of the whole batch. The update is timed on tensors like
        those of the model.
        """
        self._pass_s = _FORWARDS * self._forward_s(known.looked_s)
        self.budget.step_s = known.batches * self._pass_s + self._update_s()
        # The first batches take longer than later ones, for example to start threads or processes.
        self.budget.input_s = min(known.batches * known.batch_s, self.budget.step_s)

    def _forward_s(self, looked_s: float) -> float:
        if self._sample_s * self._whole.size > _LONG_S:
            return self._sample_s * self._whole.size
        if looked_s > _LONG_S and not self.starts_cold:
            self.budget.before_s = looked_s
            return looked_s
        model = self._stepper.switch.model
        with untouched(model, self.compute), self._stepper.forward_alone():
            if self.starts_cold:
                self._forward_of(self._whole)
            return self._forward_of(self._whole)

    def _update_s(self) -> float:
        switch = self._stepper.switch
        by_rows = [
            module.weight
            for _, module, _ in adapter_of(switch.model).tables()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        ]
        if self.plain.touched_rows == "on":
            tables = Tables.of(switch.model, switch.optimizers)
            by_rows += [weight for own in tables.by_rows.values() for weight in own]
        return sum(seconds_of_update(one, by_rows, self._clock) for one in switch.optimizers)

    def of(self, options: list[Option], facts: ModelFacts) -> bool:
        """Check each option alone, and all together; return whether there was time for it."""
        few_s = self._pass_s * self._few.size / self._whole.size
        in_passes = [one for one in options if LIVE[one.setting].in_passes]
        if not self.budget.pays_before(2 * (min(len(in_passes), 2) + 1) * few_s):
            return False
        with self._leaving_no_trace():
            plain, taken = self._passes(self.plain)
            self.few_s = taken.wall_s
            # The option with the largest expected gain comes first: time may suffice for a single
            # option only.
            in_passes.sort(key=lambda option: option.setting != "precision")
            alike: list[Option] | None = None
            for option in in_passes:
                if alike is None and option.setting != "precision":
                    alike = self._alike(in_passes, plain, taken, facts)
                if option in (alike or []):
                    continue
                settings = self.plain.but(**{option.setting: option.value})
                self._look_at(option, settings, plain, taken, facts)
            rest = [one for one in in_passes if one.field not in self.dropped]
            if len(rest) > 1:
                self._look_at_all(rest, plain, taken, facts)
        if self._is_slow(self.budget.step_s):
            looks = {f: t for f, t in self._looks.items() if self.dropped.keys().isdisjoint(f)}
            self.fastest = min(looks, key=lambda fields: looks[fields])
            self.slower["together"] = looks[self.fastest]
        return True

    @property
    def may_be_slow(self) -> bool:
        """Whether steps may be long, by the first forward pass of the few samples."""
        return self._is_slow(_FORWARDS * self._first_s * self._whole.size / self._few.size)

    def _is_slow(self, seconds: float) -> bool:
        return not self.starts_cold and is_slow(seconds)

    def _keep(self, options: Sequence[Option], now: PassTimes, plain: PassTimes) -> float:
        """Record and return the ratio of the few samples' time under options to plain time."""
        times = now.over(plain)
        self._looks[frozenset(option.field for option in options)] = times
        return times

    def frozen_rates(
        self, tried: Sequence[tuple[Option, ...]], facts: ModelFacts, least_s: float
    ) -> dict[tuple[Option, ...], tuple[float, float]]:
        """Return seconds of the forward and the backward per sample, measured on a few samples."""
        found: dict[tuple[Option, ...], tuple[float, float]] = {}
        plain: Gradients = []
        for options in ((), *tried):
            if plain and found[()][0] < least_s:
                break
            try:
                with self._leaving_no_trace():
                    gradients, forward, backward = self._marked(
                        [one.field for one in options],
                        partial(self._rates, self._under(options)),
                    )
                    same = all(map(is_finite, gradients))
                    if options and (not same or self._differ(options[0], plain, gradients, facts)):
                        continue
            except Exception as error:
                if not options or isinstance(error, OutOfMemory):
                    raise
                continue
            plain = plain or gradients
            found[options] = forward, backward
        self._sample_s = found[()][0]
        return found

    def _rates(self, settings: Settings) -> tuple[Gradients, float, float]:
        self._stepper.use(settings)
        batch, first_s = self._few_as(settings), self._first_s
        if settings != self.plain:
            with self._stepper.forward_alone(), self._stepper.switch.autocast():
                first_s = self._forward_of(batch)
        self._begin_pass()
        began = self._clock()
        loss = self._loss(batch)
        finish_device()
        forward = min(first_s, self._clock() - began)
        backward = self._timed(partial(loss.backward, retain_graph=True))
        gradients = self._take_gradients(loss)
        with suppress(RuntimeError):  # not every autograd graph allows a second backward
            backward = min(backward, self._timed(loss.backward))
        self._stepper.update.forget()
        forward, backward = (max(taken / batch.size, 1e-9) for taken in (forward, backward))
        return gradients, forward, backward

    def _alike(
        self, options: list[Option], plain: Gradients, taken: PassTimes, facts: ModelFacts
    ) -> list[Option]:
        of_parity = {one: of_change(one.field, "plain", one.value, facts) for one in options}
        some = [
            option
            for option, parity in of_parity.items()
            if parity is Parity.TOLERANT and option.setting != "precision"
        ]
        # If one of these options may have ended an earlier run, a check of each option alone shows
        # the option that did.
        is_suspect = self.marks.is_suspect([option.field for option in some])
        if len(some) < 2 or is_suspect or not self.budget.pays_before(2 * taken.wall_s):
            return []
        try:
            gradients, now = self._passes(self._under(some), taken)
        except Exception:
            return []  # a check of each option alone shows the option that fails
        is_fine = now.over(taken) <= self._far_slower and all(map(is_finite, gradients))
        if not is_fine or self._differ(some[0], plain, gradients, facts):
            return []
        self._keep(some, now, taken)
        return some

    def _under(self, options: Sequence[Option]) -> Settings:
        return self.plain.but(**{option.setting: option.value for option in options})

    def _look_at(
        self,
        option: Option,
        settings: Settings,
        plain: Gradients,
        taken: PassTimes,
        facts: ModelFacts,
    ) -> None:
        if not self.budget.pays_before(2 * taken.wall_s):
            if self.starts_cold:  # `of_step` checks it once a step has loaded the kernels
                self.unchecked.append(option)
            else:
                self.dropped[option.field] = "was not checked: there was no time"
            return
        try:
            gradients, now = self._passes(settings, taken)
            if now.over(taken) > self._far_slower and self.budget.pays_before(2 * now.wall_s):
                now = now.least(self._passes(settings, taken)[1])
        except Exception as error:
            self.dropped[option.field] = failure(error)
            return
        times = self.slower[option.field] = self._keep([option], now, taken)
        if times > self._far_slower:
            self.dropped[option.field] = f"a few samples take {times:.1f} times as long with it"
        elif why := self._wrong([option], plain, gradients, facts):
            self.dropped[option.field] = why

    def _look_at_all(
        self, options: list[Option], plain: Gradients, taken: PassTimes, facts: ModelFacts
    ) -> None:
        if not self.budget.pays_before(2 * taken.wall_s):
            self.unchecked = options
            return
        try:
            gradients, now = self._passes(self._under(options), taken)
        except Exception as error:
            why = failure(error)
        else:
            self.slower["together"] = self._keep(options, now, taken)
            why = self._wrong(options, plain, gradients, facts)
        if why:
            self.dropped["together"] = why
            self.unchecked = options  # some combinations of them may still work

    def of_step(
        self, options: Sequence[Option], settings: Settings, batch: Batch, facts: ModelFacts
    ) -> str:
        """Return the reason against trying settings on a run's next step; "" without one."""
        # Compiled code depends on the shape of a batch, so it needs the whole batch.
        is_whole = any(LIVE[option.setting].switches == "once" for option in options)
        is_whole |= batch.is_jagged
        check = copy.copy(self)
        check._few = batch if is_whole else batch.rows(0, min(self._few.size, batch.size))
        check.plain = settings.but(**{o.setting: getattr(self.plain, o.setting) for o in options})
        check._random, check._rounding = random_state(), None
        with check._keeping_gradients():
            try:
                plain = check._gradients_under(check.plain)
                gradients = check._marked(
                    [option.field for option in options],
                    partial(check._gradients_under, settings),
                    may_fork=not is_whole,
                )
            except Exception as error:
                return failure(error)
            finally:
                self._stepper.update.forget()
            if not all(map(is_finite, plain)):
                return ""  # the step itself will report the cause
            why = check._wrong(options, plain, gradients, facts)
            self._stepper.use(settings)
        return why

    def rounding(self, batch: Batch, settings: Settings) -> float:
        """Return the difference from gradients in plain precision, as a fraction of their norm."""
        check = copy.copy(self)
        check._few, check._random = batch, random_state()
        exact = settings.but(precision=self.plain.precision)
        with check._keeping_gradients():
            try:
                plain = check._gradients_under(exact)
                gradients = check._gradients_under(settings)
            finally:
                self._stepper.update.forget()
                self._stepper.use(settings)
        # If the plain gradients are not finite, the step itself will report the cause.
        return difference(plain, gradients) if all(map(is_finite, plain)) else 0.0

    def _gradients_under(self, settings: Settings) -> Gradients:
        self._stepper.use(settings)
        return self._gradients(self._few_as(settings))

    def _wrong(
        self, options: Sequence[Option], plain: Gradients, gradients: Gradients, facts: ModelFacts
    ) -> str:
        if not all(map(is_finite, gradients)):
            return "gave NaN"
        return min((self._differ(one, plain, gradients, facts) for one in options), key=len)

    def _differ(
        self, option: Option, plain: Gradients, gradients: Gradients, facts: ModelFacts
    ) -> str:
        parity = of_change(option.field, "plain", option.value, facts)
        if parity is Parity.REDRAWN:
            return ""  # other random numbers give other gradients
        share = difference(plain, gradients)
        if parity is Parity.EXACT and not all(map(are_equal, plain, gradients)):
            return "" if self._is_plain_again(plain, share) else "would change the result"
        most = _HALF_ROUNDING if option.setting == "precision" else _ROUNDING
        if share > most and share > self._own_rounding(plain):
            return f"gradients differ by {share:.0%}: more than rounding"
        return ""

    def _is_plain_again(self, plain: Gradients, share: float) -> bool:
        if not self.starts_cold:
            return False
        self._stepper.use(self.plain)
        again = self._gradients(self._few)
        return 0 < share <= _AS_PLAIN * difference(plain, again)

    def _own_rounding(self, plain: Gradients) -> float:
        if not (self.starts_cold and torch.backends.cudnn.allow_tf32):
            return 0.0
        if self._rounding is None:
            self._stepper.use(self.plain.but(matmul_precision="highest"))
            with torch.backends.cudnn.flags(allow_tf32=False):
                exact = self._gradients(self._few)
            self._rounding = _AS_PLAIN * difference(exact, plain)
        return self._rounding

    def _few_as(self, settings: Settings) -> Batch:
        if settings.memory_format == "channels_last":
            return self._few.to_memory_format(torch.channels_last)
        return self._few

    def _timed(self, run: Callable[[], object]) -> float:
        began = self._clock()
        run()
        finish_device()
        return self._clock() - began

    def _marked(
        self, fields: Collection[str], look: Callable[[], T], *, may_fork: bool = True
    ) -> T:
        self.marks.check(fields, "look", look if may_fork else None)
        with self.marks.on(fields, "look"):
            return look()

    def _passes(
        self, settings: Settings, plain: PassTimes | None = None
    ) -> tuple[Gradients, PassTimes]:
        fields = settings.other_than(self.plain)
        return self._marked(fields, partial(self._passes_under, settings, plain))

    def _passes_under(
        self, settings: Settings, plain: PassTimes | None
    ) -> tuple[Gradients, PassTimes]:
        began = self._clock()
        self._stepper.use(settings)
        batch = self._few_as(settings)
        found, first = self._timed_passes(batch)
        # Wall time of the first pass, including the switch to these settings.
        first_s = self._clock() - began
        taken = first
        # For a long step, a second pass over a few samples costs little.
        is_short = not (self.starts_cold or self._is_slow(self.budget.step_s))
        if plain is not None and is_short and first.over(plain) <= _OF_FIRST:
            taken = plain
        elif self.starts_cold or self.budget.pays_before(2 * first_s):
            taken = first.least(self._timed_passes(batch)[1])
        is_loading = self.starts_cold and settings == self.plain
        loading_s = first_s - taken.wall_s if is_loading else 0.0
        self._loading_s += loading_s  # else the first step would spend this time
        self.budget.before_s += self._clock() - began - loading_s
        return found, taken

    def _timed_passes(self, batch: Batch) -> tuple[Gradients, PassTimes]:
        began, used = self._clock(), self._cpu_clock()
        found = self._gradients(batch)
        finish_device()
        wall_s = max(self._clock() - began, 1e-9)
        cpu_s = wall_s if self.starts_cold else max(self._cpu_clock() - used, 1e-9)
        return found, PassTimes(wall_s, cpu_s)

    def _gradients(self, batch: Batch) -> Gradients:
        self._begin_pass()
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return self._take_gradients(loss)

    def _begin_pass(self) -> None:
        self._moved.put_back()  # values such as Keras' seeds, or vectors of a spectral norm
        set_random_state(self._random)
        self._stepper.update.begin()

    def _loss(self, batch: Batch) -> torch.Tensor:
        stepper = self._stepper
        forward = stepper.chain.forward(self.compute)

        def compute(_: Step) -> torch.Tensor:
            with stepper.switch.autocast():
                value = forward(batch)
            return value[0] if isinstance(value, tuple) else value

        again = Step(0, (batch,), self.compute, stepper.turn)
        return stepper.chain.repeat(again, compute)

    def _take_gradients(self, loss: torch.Tensor) -> Gradients:
        update = self._stepper.update
        found = [loss.detach(), *map(summed, (p.grad for p in update.parameters))]
        update.forget()
        return found

    @contextmanager
    def _leaving_no_trace(self) -> Iterator[None]:
        self._random, self._loading_s = random_state(), 0.0
        began, before = self._clock(), self.budget.before_s
        try:
            with self._keeping_gradients():
                yield
        finally:
            self._stepper.use(self.plain)
            self.budget.before_s = before + self._clock() - began - self._loading_s

    @contextmanager
    def _keeping_gradients(self) -> Iterator[None]:
        model = self._stepper.switch.model
        kept = [(p, p.grad) for p in adapter_of(model).parameters()]
        self._moved = Moving(model, draws=False, weights=self._moving)
        self._moved.keep()
        try:
            with untouched(model, self.compute):
                yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
