"""Decides the open settings of a Recipe by measuring them on the user's own model and batches.

    1  plain       what torch does unasked; this also tells how long the run will take
    2  allocator   first, because its limits cannot be put back
    3  together    all options within `allow` against plain, since they help one another: bf16
                   alone may be slower where bf16 with channels_last is three times faster
    4  one out     each option against the same settings without it; what is measured and is not
                   faster goes
    5  threads     for short steps
    6  the whole   what is left against plain; if that does not win, plain it is
    7  compile     only where the run is long enough to repay the compilation

The time spent is a share of the run, and a few seconds at most: each piece begins only where what
is left pays for it, and what was proven by then holds (auto_budget.py). The answer is kept in a
cache by model, shapes, machine and request, unless the machine was too busy to measure well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter as clock
from typing import Any

import torch

from flatout.console import first_line
from flatout.data import Batch
from flatout.devices import allocator
from flatout.errors import OutOfMemory
from flatout.measure import OutOfTime, TrialResult, usable_cpus
from flatout.measure.fingerprint import fingerprint
from flatout.models import find_rewrites, may_be_slower_in_bf16, uses_convolution
from flatout.recipe import SETTINGS, Choice, ModelFacts, Parity, Recipe, ResolvedRecipe, of_change
from flatout.train import auto_cache
from flatout.train.auto_budget import Budget
from flatout.train.auto_trials import Option, Trials, is_faster
from flatout.train.micro_batch import forget_frames, is_out_of_memory
from flatout.train.settings import Settings, Switch, can_switch
from flatout.train.step import Compute, Stepper

# A tenth of fewer steps than this pays for no trial, however long they take.
FEWEST_STEPS = 60
# Tracing takes at most so long for each module.
_TRACE_S = 0.001
# Compiling takes tens of seconds: it is tried only for runs that last longer than this, and whose
# tenth pays for what it takes at most: so long, and so long for each module.
COMPILE_FROM_S = 600.0
_COMPILE_S = (30.0, 1.0)
# Thread counts matter for small operators; long steps keep all CPUs busy.
SHORT_STEP_S = 0.02

Choices = dict[str, Choice]


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
        stepper: holds model and optimizer; both are as before when this returns.
        compute: forward and loss of one batch; None decides without measuring.
        batches: the first batches, on the device; none decides without measuring.
        facts: of the model.
        allow: the farthest parity that a choice may have.
        steps: planned optimizer steps, or None where that is not known.
        say: prints the one line about the decision.
    """
    machine = fingerprint().as_dict()
    plain = _plain_choices(requested, stepper, allow)
    if compute is None or not batches:
        return requested.resolve(plain, machine, facts)
    key = auto_cache.key(requested, stepper, batches, allow, steps)
    cached = auto_cache.read(key)
    if cached is not None:
        say(f"auto: {cached[0].summary()} (measured {cached[1]:%Y-%m-%d}, from the cache)")
        return cached[0]
    budget = Budget(steps, clock)
    start = Settings.of(requested.resolve(plain, machine, facts))
    trials = Trials(stepper, compute, batches, start, budget)
    facts = trials.facts(facts)
    if not _is_open(requested, allow):
        return requested.resolve(plain, machine, facts)
    found: Choices = {}
    why_not = f"a run of {steps} steps is too short to repay measuring"
    if steps is None or steps >= FEWEST_STEPS:
        try:
            found, why_not = _measure(trials, requested, facts, allow, steps)
        except OutOfTime:
            pass
        except (RuntimeError, MemoryError) as error:
            # Under other settings, or of the copies that leave no trace; plain steps may well fit.
            if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
                raise
            forget_frames(error)
            why_not = "memory does not suffice to try other settings"
    resolved = requested.resolve({**plain, **found}, machine, facts)
    if why_not:
        say(f"auto: {resolved.summary()}; {why_not}")
        return resolved
    if not found:
        return resolved
    busy = "; the machine is busy, so the next run measures again" if trials.disturbed else ""
    if not busy and (trials.whole is not None or not trials.stopped):
        auto_cache.write(key, resolved)
    say(_line(resolved, trials, budget.spent_s) + busy)
    return resolved


def _measure(
    trials: Trials, requested: Recipe, facts: ModelFacts, allow: Parity, steps: int | None
) -> tuple[Choices, str]:
    """What was found, or why nothing was tried.

    Raises:
        OutOfTime: the budget does not pay for the first step.
    """
    budget, stepper = trials.budget, trials.stepper
    trials.first_pass()
    budget.require(_TRACE_S * sum(1 for _ in stepper.switch.model.modules()))
    options = _options(requested, stepper, facts, allow)
    open_threads = requested.get("process.threads") == "auto" and allow >= Parity.TOLERANT
    if not options and not open_threads:
        return {}, ""
    with trials.leaving_no_trace():
        step_s = trials.first_step()
        if step_s is None:
            return {}, "the first step fails"  # the real first step will fail in the same way
        budget.require(trials.round_s)
        best = trials.decide(options, open_threads and step_s < SHORT_STEP_S)
        found = _choices(trials, options, best, facts)
        keyed = stepper.dropout is not None  # which does not reach into compiled code
        if requested.get("compute.compile") == "auto" and steps is not None and not keyed:
            expected = steps * step_s / (trials.whole.ratio if trials.whole else 1.0)
            found |= _compile(trials, best, expected, facts, allow)
    return found, ""


# -- what may be tried ---------------------------------------------------------------------------

_MEASURED = [field for field, one in SETTINGS.items() if one.trial and one.trial.why]


def _is_open(requested: Recipe, allow: Parity) -> bool:
    """Whether the request leaves anything to measure."""
    return any(requested.get(field) == "auto" for field in _MEASURED) or (
        requested.get("process.threads") == "auto" and allow >= Parity.TOLERANT
    )


def _plain_choices(requested: Recipe, stepper: Stepper, allow: Parity) -> Choices:
    """What torch does unasked, for every field that says `auto`.

    One thing is mended unmeasured: more threads than usable CPUs, as in a container, wait for one
    another in every operator.
    """
    usable = usable_cpus()
    fewer = usable < torch.get_num_threads() and allow >= Parity.TOLERANT
    choices = {}
    for field, setting in SETTINGS.items():
        if requested.get(field) == "auto":
            ask = setting.unmeasured
            value, why = ask(stepper.switch) if ask else (setting.plain, "plain")
            choices[field] = _choice(value, why, Parity.EXACT)
    if fewer and "process.threads" in choices:
        choices["process.threads"] = _choice(usable, "the usable CPUs", Parity.TOLERANT)
    return choices


class _Job:
    """What is trained as settings ask about it."""

    def __init__(self, switch: Switch) -> None:
        device = switch.device
        self.has_gpu = device.type == "cuda"
        self.could_use_bf16 = _has_bf16_units(device)
        self.has_tf32_units = self.has_gpu and torch.cuda.get_device_capability(device) >= (8, 0)
        self.has_convolutions = uses_convolution(switch.model)
        self.may_be_slower_in_bf16 = (
            device.type == "cpu" and self.could_use_bf16 and may_be_slower_in_bf16(switch.model)
        )
        self.has_rewrites = bool(find_rewrites(switch.model))
        self.can_fuse = any(map(can_switch, switch.optimizers))
        keeps = switch.now.allocator == "keep"
        self.returns_memory = device.type == "cpu" and allocator.supported() and not keeps


def _options(requested: Recipe, stepper: Stepper, facts: ModelFacts, allow: Parity) -> list[Option]:
    """Options that are open in the request, fit model and machine, and lie within `allow`."""
    job = _Job(stepper.switch)
    return [
        Option(field, trial)
        for field in _MEASURED
        if (trial := SETTINGS[field].trial) is not None
        and requested.get(field) == "auto"
        and trial.fits(job)
        and of_change(field, "plain", trial.value, facts) <= allow
    ]


def _has_bf16_units(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    instructions = fingerprint().as_dict().get("instructions", ())
    return any(name in instructions for name in ("amx_bf16", "avx512_bf16", "bf16"))


# -- deciding ------------------------------------------------------------------------------------


def _choices(trials: Trials, options: list[Option], best: Settings, facts: ModelFacts) -> Choices:
    """A Choice for each field that was looked at, chosen or not."""
    choices = {}
    for option in options:
        trial = trials.results.get(option.field)
        plain = getattr(trials.plain, option.setting)
        if getattr(best, option.setting) == option.trial.value:
            parity = of_change(option.field, "plain", option.trial.value, facts)
            why = trials.evidence(option)
            measured = trial or trials.together
            choices[option.field] = _choice(option.trial.value, why, parity, measured)
        else:
            why = f"{option.trial.value} {trials.objection(option)}"
            choices[option.field] = _choice(plain, why, Parity.EXACT)
    trial = trials.results.get("process.threads")
    if trial is not None and best.threads != trials.plain.threads:
        why = "short steps run faster on one thread"
        choices["process.threads"] = _choice(1, why, Parity.TOLERANT, trial)
    elif trial is not None:
        why = f"one thread measured {trial.words}: not faster"
        choices["process.threads"] = _choice(trials.plain.threads, why, Parity.EXACT)
    return choices


def _compile(
    trials: Trials, best: Settings, expected_s: float, facts: ModelFacts, allow: Parity
) -> Choices:
    """torch.compile, where the run outlasts the compilation by far."""
    field = "compute.compile"
    parity = of_change(field, "off", "on", facts)
    if parity > allow:
        return {}
    # The few seconds of all other measuring would not do; the share of the run holds.
    trials.budget.longest_s = math.inf
    fixed, each = _COMPILE_S
    most = fixed + each * sum(1 for _ in trials.stepper.switch.model.modules())
    if expected_s < COMPILE_FROM_S or not trials.budget.pays_for(most):
        reason = f"the run takes about {expected_s:.0f} s, too short to repay compiling"
        return {field: _choice("off", reason, Parity.EXACT)}
    try:
        took, trial = trials.compiled(best)
    except OutOfTime:
        return {field: _choice("off", "compiling left no time to measure it", Parity.EXACT)}
    except Exception as error:
        reason = f"fails here: {first_line(error)}"
        return {field: _choice("off", reason, Parity.EXACT)}
    saved = expected_s * (1 - 1 / trial.ratio)
    if is_faster(trial) and saved > 2 * took:
        reason = f"compiles in {took:.0f} s, saves {saved:.0f} s"
        return {field: _choice("on", reason, parity, trial)}
    reason = f"measured {trial.words}, compiles in {took:.0f} s: not worth it"
    return {field: _choice("off", reason, Parity.EXACT)}


def _choice(value: Any, reason: str, parity: Parity, trial: TrialResult | None = None) -> Choice:
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


def _line(resolved: ResolvedRecipe, trials: Trials, seconds: float) -> str:
    """The one line that says what was decided, and what it does to the result."""
    if trials.whole is None:
        before = " before its time was up" if trials.stopped else ""
        return (
            f"auto: nothing measured faster than plain{before}, in {seconds:.1f} s; left as it is"
        )
    parity = max(choice.parity for choice in resolved.choices.values())
    return (
        f"auto: {resolved.summary()}: {trials.whole.words} faster than plain, "
        f"measured in {seconds:.1f} s; result: {parity.words}"
    )
