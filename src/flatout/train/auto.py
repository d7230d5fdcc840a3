"""Decides the open settings of a Recipe by measuring them on the user's own model and batches.

    1  plain            what torch does unasked; also tells how long the run will take
    2  everything       all options within `allow` together, since they help one another: bf16
    alone may be
                        slower where bf16 with channels_last is three times faster
    3  one out          each option against the same settings without it; what is not measured
    faster goes
    4  threads          for short steps
    5  the whole        what is left against plain; if that does not win, plain it is
    6  compile          only where the run is long enough to repay the compilation

Every trial is made of real training steps, in blocks A B B A; weights, optimiser and random states
are put back bit for bit. The time spent is a share of the run, and a few seconds at most. The
answer is kept in a cache by model, shapes, machine and request.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatout
from flatout.data.batch import Batch, split, to_memory_format
from flatout.devices import allocator
from flatout.measure import TrialResult, fingerprint, page_faults, run_trial, usable_cpus
from flatout.models import find_rewrites, uses_convolution
from flatout.recipe import (
    Choice,
    ModelFacts,
    Parity,
    Recipe,
    ResolvedRecipe,
    dumps,
    loads,
    of_change,
)
from flatout.train.settings import Settings, can_switch
from flatout.train.snapshot import Snapshot, random_state, set_random_state, untouched
from flatout.train.step import Compute, Stepper

# Measuring may take this many seconds, and this share of the run it is for.
LONGEST_S = 6.0
SHARE = 0.1
# Compiling takes tens of seconds: it is tried only for runs that last longer than this.
COMPILE_FROM_S = 600.0
# A plain step longer than this is measured on a part of the batch.
LONG_STEP_S = 0.5
# Large gains that do not depend on the size of the tensors show on a part of the batch as well.
QUICK_PART = 4
# Thread counts matter for small operators; long steps keep all CPUs busy.
SHORT_STEP_S = 0.02
# A block of steps lasts at least this long, so that the clock and the switching do not show.
BLOCK_S = 0.04


@dataclass(frozen=True)
class Option:
    """A setting that may be faster.

    Attributes:
        field: its dotted name in the Recipe.
        setting: its name in Settings.
        value: the value in Settings that may be faster than the plain one.
        recipe_value: the same in the Recipe.
        why: why it may be, for people.
        by_size: its gain comes from large tensors (memory traffic, page faults), so it has to be
            measured on the whole batch.
    """

    field: str
    setting: str
    value: Any
    recipe_value: str
    why: str
    by_size: bool = True


def resolve(
    requested: Recipe,
    stepper: Stepper,
    compute: Compute | None,
    batches: list[Batch],
    facts: ModelFacts,
    allow: Parity,
    steps: int | None,
    say: Callable[[str], None],
) -> ResolvedRecipe:
    """The concrete Recipe for this job on this machine.

    Args:
        requested: fields that say `auto` are decided here.
        stepper: holds model and optimiser; both are as before when this returns.
        compute: forward and loss of one batch; None decides without measuring.
        batches: the first batches, on the device; none decides without measuring.
        facts: of the model.
        allow: the farthest parity that a choice may have.
        steps: planned optimiser steps, or None where that is not known.
        say: prints the one line about the decision.
    """
    plain = _plain_choices(requested, stepper, facts)
    start = _settings(requested.resolve(plain, {}, facts))
    if compute is None or not batches:
        return requested.resolve(plain, fingerprint().as_dict(), facts)
    job = _Measured(stepper, compute, batches, start)
    options = _options(requested, stepper, job.facts(facts), allow)
    if not options and not _threads_open(requested, allow):
        return requested.resolve(plain, fingerprint().as_dict(), facts)
    key = _cache_key(requested, stepper, batches, allow, steps)
    cached = _read_cache(key)
    if cached is not None:
        say(f"auto: {cached[0].summary()} (measured {cached[1]:%Y-%m-%d}, from the cache)")
        return cached[0]
    found = job.decide(options, facts, allow, steps, _threads_open(requested, allow), requested)
    resolved = requested.resolve({**plain, **found}, fingerprint().as_dict(), facts)
    if job.measured:
        _write_cache(key, resolved)
    say(_line(resolved, job))
    return resolved


# -- what may be tried ---------------------------------------------------------------------------


def _plain_choices(requested: Recipe, stepper: Stepper, facts: ModelFacts) -> dict[str, Choice]:
    """What torch does unasked, for every field that says `auto`."""
    cuda = stepper.switch.device.type == "cuda"
    values: dict[str, tuple[Any, str]] = {
        "compute.precision": ("fp32", "plain"),
        "compute.memory_format": ("contiguous", "plain"),
        "compute.rewrites": ("off", "plain"),
        "compute.fused_optimizer": ("off", "plain"),
        "compute.compile": ("off", f"the run is not known to last {COMPILE_FROM_S:.0f} s"),
        "compute.matmul_precision": (torch.get_float32_matmul_precision(), "plain"),
        "memory.micro_batch": ("whole", "split only if memory runs out"),
        "memory.allocator": (stepper.switch.now.allocator, "as the process started"),
        "process.threads": (min(torch.get_num_threads(), usable_cpus()), "the usable CPUs"),
        "process.interop_threads": (torch.get_num_interop_threads(), "torch's own"),
        "process.affinity": ("off", "not measured faster"),
        "process.flush_denormals": ("off", "not measured faster"),
        "input.workers": (0, "not measured faster"),
        "input.pin_memory": ("on" if cuda else "off", "copies overlap" if cuda else "no GPU"),
        "world.device": (str(stepper.switch.device), "the device found"),
    }
    return {
        field: Choice(value=value, reason=reason, parity=Parity.EXACT)
        for field, (value, reason) in values.items()
        if requested.get(field) == "auto"
    }


def _options(requested: Recipe, stepper: Stepper, facts: ModelFacts, allow: Parity) -> list[Option]:
    """Options that are open in the request, fit model and machine, and lie within `allow`."""
    model, device = stepper.switch.model, stepper.switch.device
    candidates: list[Option] = []
    # The allocator before all others, because its limits cannot be put back; then the largest
    # gains first: what there is no time to measure stays plain.
    if device.type == "cpu" and allocator.supported() and stepper.switch.now.allocator != "keep":
        why = "fewer page faults"
        candidates.append(_option("memory.allocator", "allocator", "keep", why))
    if _has_bf16_units(device):
        why = "bf16 units are there"
        candidates.append(_option("compute.precision", "precision", "bf16", why, by_size=False))
    if uses_convolution(model):
        why = "convolutions read it in order"
        field, setting = "compute.memory_format", "memory_format"
        candidates.append(_option(field, setting, "channels_last", why, by_size=False))
    if find_rewrites(model):
        candidates.append(_option("compute.rewrites", "rewrites", True, "less memory traffic"))
    if can_switch(stepper.switch.optimizer):
        why = "one kernel for the whole update"
        candidates.append(_option("compute.fused_optimizer", "fused_optimizer", True, why))
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        why = "TF32 units are there"
        candidates.append(_option("compute.matmul_precision", "matmul_precision", "high", why))
    return [
        c
        for c in candidates
        if requested.get(c.field) == "auto"
        and of_change(c.field, "plain", c.recipe_value, facts) <= allow
    ]


def _option(field: str, setting: str, value: Any, why: str, *, by_size: bool = True) -> Option:
    return Option(field, setting, value, "on" if value is True else value, why, by_size)


def _threads_open(requested: Recipe, allow: Parity) -> bool:
    return requested.get("process.threads") == "auto" and allow >= Parity.TOLERANT


def _has_bf16_units(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    instructions = fingerprint().as_dict().get("instructions", ())
    return any(name in instructions for name in ("amx_bf16", "avx512_bf16", "bf16"))


def _settings(recipe: ResolvedRecipe) -> Settings:
    return Settings.of(recipe)


# -- measuring -----------------------------------------------------------------------------------


class _Measured:
    """Trials on one job; the job is as before after each of its methods."""

    def __init__(
        self, stepper: Stepper, compute: Compute, batches: list[Batch], start: Settings
    ) -> None:
        self.stepper = stepper
        self.compute = compute
        self.batches = batches
        self.plain = start
        self.part = 1
        self.measured = False
        self.reason = ""
        self.seconds = 0.0
        self.whole: TrialResult | None = None
        self.rejected: dict[str, str] = {}
        self.faults = (0, 0)
        self._seen: dict[tuple[Settings, int], float] = {}

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
                self.compute(self.batches[0])
                drawn = not torch.equal(torch.get_rng_state(), before)
        finally:
            for handle in handles:
                handle.remove()
        # Random numbers drawn outside of the modules that were watched may fall anywhere.
        by_layout = any(on_images) or (drawn and not dropouts)
        return replace(facts, draws_random=facts.draws_random or drawn, draws_by_layout=by_layout)

    def decide(
        self,
        options: list[Option],
        facts: ModelFacts,
        allow: Parity,
        steps: int | None,
        threads_open: bool,
        requested: Recipe,
    ) -> dict[str, Choice]:
        """The choices that were measured faster, by field."""
        began = time.perf_counter()
        snapshot = Snapshot(self.stepper.switch.model, self.stepper.switch.optimizer)
        try:
            return self._decide(options, facts, allow, steps, threads_open, requested)
        finally:
            self.stepper.use(self.plain)
            snapshot.restore()
            self.stepper.use(self.plain)
            self.stepper.update.clear()
            self.seconds = time.perf_counter() - began

    def _decide(
        self,
        options: list[Option],
        facts: ModelFacts,
        allow: Parity,
        steps: int | None,
        threads_open: bool,
        requested: Recipe,
    ) -> dict[str, Choice]:
        step_s = self._first_step()
        if step_s is None:
            self.reason = "the first step failed"
            return {}
        budget = LONGEST_S if steps is None else min(LONGEST_S, SHARE * steps * step_s)
        if budget < 4 * max(step_s / self.part, BLOCK_S / 2):
            self.reason = f"a run of {steps} steps is too short to repay measuring"
            return {}
        self.measured = True
        deadline = time.perf_counter() + budget
        options = [o for o in options if self._works(o)]
        best, trials = self._best_of(options, deadline)
        if threads_open and step_s < SHORT_STEP_S:
            best = self._fewer_threads(best, trials, deadline)
        best = self._confirm(best, deadline)
        choices = self._choices(options, best, trials, facts)
        if requested.get("compute.compile") == "auto" and steps is not None:
            expected = steps * step_s / (self.whole.ratio if self.whole else 1.0)
            choices.update(self._compile(best, expected, facts, allow))
        return choices

    def _first_step(self) -> float | None:
        """Seconds of a plain step on the whole batch; long steps go on with a part of it."""
        try:
            self._run(self.plain, 1)
            seconds = self._run(self.plain, 1)
        except Exception:
            return None  # the real first step will fail in the same way, and is reported
        while seconds / self.part > LONG_STEP_S and self.part * 2 <= self.batches[0].size:
            self.part *= 2
        return seconds

    def _works(self, option: Option) -> bool:
        """Whether a step under this option runs, is finite and, for a rewrite, is bit-identical."""
        if option.setting == "allocator":
            return True  # trying it would be using it: it cannot be undone
        settings = self.plain.but(**{option.setting: option.value})
        try:
            if option.setting == "rewrites" and not self._same_gradients(settings):
                self.rejected[option.field] = "the result would differ"
                return False
            self._run(settings, 1, part=max(1, self.batches[0].size // 16))
        except Exception as error:
            self.rejected[option.field] = f"fails here: {str(error).splitlines()[0]}"
            return False
        if self.stepper.update.was_bad():
            self.stepper.update.clear()
            self.rejected[option.field] = "gave NaN"
            return False
        return True

    def _same_gradients(self, settings: Settings) -> bool:
        batch = _head(self.batches[0], 16)
        found = []
        before = random_state()
        for wanted in (self.plain, settings):
            self.stepper.use(wanted)
            set_random_state(before)
            value = self.compute(batch)
            loss = value[0] if isinstance(value, tuple) else value
            loss.backward()  # type: ignore[no-untyped-call]
            found.append([loss.detach(), *(p.grad for p in self.stepper.update.parameters)])
            self.stepper.switch.optimizer.zero_grad(set_to_none=True)
        plain, rewritten = found
        return all(
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(plain, rewritten, strict=True)
        )

    def _best_of(
        self, options: list[Option], deadline: float
    ) -> tuple[Settings, dict[str, TrialResult]]:
        """All options together, then without each in turn; returns the rest and each trial."""
        best = self.plain.but(**{o.setting: o.value for o in options})
        trials: dict[str, TrialResult] = {}
        for option in options:
            without = best.but(**{option.setting: getattr(self.plain, option.setting)})
            if option.setting == "allocator":
                trials[option.field] = trial = self._allocator_trial(without, best)
                best = best if _is_faster(trial) else without
                continue
            trial = None if option.by_size else self._quick_trial(without, best, deadline)
            if trial is None or not _is_faster(trial):
                trial = self._trial(without, best, deadline)
            if trial is not None:
                trials[option.field] = trial
            if trial is None or not _is_faster(trial):
                best = without
        return best, trials

    def _fewer_threads(
        self, best: Settings, trials: dict[str, TrialResult], deadline: float
    ) -> Settings:
        """Short steps may be faster on one thread than on all."""
        if self.plain.threads == 1:
            return best
        one = best.but(threads=1)
        trial = self._trial(best, one, deadline)
        if trial is None:
            return best
        trials["process.threads"] = trial
        return one if _is_faster(trial) else best

    def _confirm(self, best: Settings, deadline: float) -> Settings:
        """What was kept must win as a whole against plain."""
        if best == self.plain:
            return best
        # The answer that all the time was spent for is not dropped for want of a little more. One
        # round is enough for a large gain.
        for rounds in (1, 3):
            self.whole = self._trial(self.plain, best, math.inf, most=rounds)
            if self.whole is not None and _is_faster(self.whole):
                return best
        self.whole = None
        return self.plain

    def _compile(
        self, best: Settings, expected_s: float, facts: ModelFacts, allow: Parity
    ) -> dict[str, Choice]:
        """torch.compile, where the run outlasts the compilation by far."""
        field = "compute.compile"
        parity = of_change(field, "off", "on", facts)
        if parity > allow:
            return {}
        if expected_s < COMPILE_FROM_S:
            reason = f"the run takes about {expected_s:.0f} s, too short to repay compiling"
            return {field: Choice(value="off", reason=reason, parity=Parity.EXACT)}
        compiled = best.but(compile=True)
        began = time.perf_counter()
        try:
            self._run(compiled, 1)
            took = time.perf_counter() - began
            trial = self._trial(best, compiled, math.inf, most=4)
            assert trial is not None
        except Exception as error:
            reason = f"fails here: {str(error).splitlines()[0]}"
            return {field: Choice(value="off", reason=reason, parity=Parity.EXACT)}
        saved = expected_s * (1 - 1 / trial.ratio)
        if _is_faster(trial) and saved > 2 * took:
            reason = f"compiles in {took:.0f} s, saves {saved:.0f} s"
            return {field: _choice("on", reason, parity, trial)}
        reason = f"measured {trial.words}, compiles in {took:.0f} s: not worth it"
        return {field: Choice(value="off", reason=reason, parity=Parity.EXACT)}

    def _choices(
        self,
        options: list[Option],
        best: Settings,
        trials: dict[str, TrialResult],
        facts: ModelFacts,
    ) -> dict[str, Choice]:
        """A Choice for each field that was looked at, chosen or not."""
        choices = {}
        part = f", on 1/{self.part} of the batch" if self.part > 1 else ""
        for option in options:
            why = option.why
            if option.setting == "allocator":
                why = "page faults a step: {:,} before, {:,} after".format(*self.faults)
            trial = trials.get(option.field)
            if trial is None:
                continue  # there was no time to measure it, so it stays plain
            if getattr(best, option.setting) == option.value:
                parity = of_change(option.field, "plain", option.recipe_value, facts)
                choices[option.field] = _choice(option.recipe_value, why + part, parity, trial)
            else:
                plain = getattr(self.plain, option.setting)
                value = {True: "on", False: "off"}.get(plain, plain)
                reason = f"{option.recipe_value} measured {trial.words}: not faster{part}"
                choices[option.field] = _choice(value, reason, Parity.EXACT, None)
        if "process.threads" in trials:
            trial = trials["process.threads"]
            if best.threads != self.plain.threads:
                reason = "short steps run faster on one thread"
                choices["process.threads"] = _choice(1, reason, Parity.TOLERANT, trial)
            else:
                reason = f"one thread measured {trial.words}: not faster"
                choices["process.threads"] = _choice(self.plain.threads, reason, Parity.EXACT, None)
        return choices

    def _trial(
        self,
        a: Settings,
        b: Settings,
        deadline: float,
        most: int = 4,
        part: int | None = None,
    ) -> TrialResult | None:
        """A against B in the time that is left; None where not even one round fits."""
        part = self.part if part is None else part
        left = deadline - time.perf_counter()
        # Four blocks of two steps; a setting not seen yet takes what plain takes, more or less.
        usual = self._seen[self.plain, 1] / part
        if 4 * (self._seen.get((a, part), usual) + self._seen.get((b, part), usual)) > left:
            return None
        return run_trial(
            lambda: self._run(a, part=part),
            lambda: self._run(b, part=part),
            max_pairs=most,
            min_pairs=min(2, most),
            deadline_s=left,
        )

    def _allocator_trial(self, without: Settings, with_it: Settings) -> TrialResult:
        """Blocks A A A A, then B B B B: glibc's own adaptive limits do not come back once set.

        What makes up for the missing interleaving is the count of page faults.
        """
        self._run(without)
        before, faults = [self._run(without) for _ in range(4)], self._faults(without)
        after = [self._run(with_it) for _ in range(4)]
        self.faults = (faults, self._faults(with_it))
        a, b = iter(before), iter(after)
        return run_trial(lambda: next(a), lambda: next(b), max_pairs=2)

    def _faults(self, settings: Settings) -> int:
        """Page faults of one step."""
        self.stepper.use(settings)
        before = page_faults()
        self._time(self.batches, 1)
        return page_faults() - before

    def _quick_trial(self, a: Settings, b: Settings, deadline: float) -> TrialResult | None:
        """One or two rounds on a part of the batch, for differences too large to miss."""
        part = self.part * QUICK_PART
        if self.batches[0].size < 16 * part:
            return None
        return self._trial(a, b, deadline, most=2, part=part)

    def _run(self, settings: Settings, count: int | None = None, part: int = 1) -> float:
        """Seconds per step of one block under `settings`, after one step to settle."""
        self.stepper.use(settings)
        batches = self.batches
        if part > 1:
            batches = [_head(b, max(1, b.size // part)) for b in batches]
        if settings.memory_format == "channels_last":
            batches = [to_memory_format(b, torch.channels_last) for b in batches]
        first = self._time(batches, 1)
        if count is None:
            least = 1 if first > 2 * BLOCK_S else 2
            count = max(least, min(200, round(BLOCK_S / max(first, 1e-6))))
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


def _is_faster(trial: TrialResult) -> bool:
    """Whether B won; a difference of half and more shows in a single round of four blocks."""
    return trial.wins or (trial.pairs == 1 and trial.ratio > 1.5 + 3 * trial.floor)


def _choice(value: Any, reason: str, parity: Parity, trial: TrialResult | None) -> Choice:
    if trial is None:
        return Choice(value=value, reason=reason, parity=parity)
    return Choice(
        value=value,
        reason=reason,
        parity=parity,
        ratio=trial.ratio,
        low=trial.low,
        high=trial.high,
        floor=trial.floor,
    )


def _head(batch: Batch, size: int) -> Batch:
    return split(batch, max(1, -(-batch.size // size)))[0]


def _line(resolved: ResolvedRecipe, job: _Measured) -> str:
    """The one line that says what was decided, and what it does to the result."""
    if not job.measured:
        return f"auto: {resolved.summary()}; {job.reason}"
    if job.whole is None:
        return f"auto: nothing measured faster than plain, in {job.seconds:.1f} s; left as it is"
    parity = max(choice.parity for choice in resolved.choices.values())
    return (
        f"auto: {resolved.summary()}: {job.whole.words} faster than plain, "
        f"measured in {job.seconds:.1f} s; result: {parity.words}"
    )


# -- the cache -----------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where decisions are kept: `FLATOUT_CACHE`, or `flatout` in the user's cache folder."""
    own = os.environ.get("FLATOUT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "flatout"


def _cache_key(
    requested: Recipe, stepper: Stepper, batches: list[Batch], allow: Parity, steps: int | None
) -> str:
    model, optimizer = stepper.switch.model, stepper.switch.optimizer
    groups = [{k: str(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    parts = {
        "version": flatout.__version__,
        "machine": fingerprint().digest,
        "process": [stepper.switch.now.allocator, torch.get_num_threads()],
        "model": [
            repr(model),
            [(n, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()],
        ],
        "optimizer": [
            type(optimizer).__qualname__,
            groups,
            asdict(stepper.switch.now)["precision"],
        ],
        "batch": [_shapes(b) for b in batches],
        "allow": allow.words,
        "requested": dumps(requested),
        # Whether compiling pays depends on the length of the run, to its order of magnitude.
        "steps": 0 if steps is None else len(str(steps)),
    }
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()[:24]


def _shapes(batch: Batch) -> str:
    def shape(value: Any) -> Any:
        if torch.is_tensor(value):
            return [list(value.shape), str(value.dtype)]
        if isinstance(value, dict):
            return {k: shape(v) for k, v in value.items()}
        return [shape(v) for v in value] if isinstance(value, (tuple, list)) else str(type(value))

    return json.dumps([shape(batch.inputs), shape(batch.targets)])


def _read_cache(key: str) -> tuple[ResolvedRecipe, datetime] | None:
    path = cache_folder() / "auto" / f"{key}.toml"
    try:
        recipe = loads(path.read_text())
        when = datetime.fromtimestamp(path.stat().st_mtime)
    except (OSError, ValueError):
        return None  # absent or damaged: measured anew
    return (recipe, when) if isinstance(recipe, ResolvedRecipe) else None


def _write_cache(key: str, resolved: ResolvedRecipe) -> None:
    folder = cache_folder() / "auto"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(dumps(resolved))
        os.replace(file.name, folder / f"{key}.toml")
    except OSError:
        pass  # a cache that cannot be written costs the next run a few seconds, nothing else
