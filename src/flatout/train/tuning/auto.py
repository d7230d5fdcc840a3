"""Decides the open settings of a Recipe by measuring them on the user's own model and batches.

Before the first step each option is checked on a few samples (first_check.py). Options that work
are then tried on the job's own steps while training continues (search.py, tuner.py), so that no
step is lost. The result is cached by model, shapes, machine and request, unless the machine was too
busy to measure well (decision_cache.py).

The plain value of a setting is that of a plain PyTorch script. An option is a setting with another
value, which may be faster. Tuning, or the search, is the sequence of trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from flatout.data import NO_ROWS, Batch
from flatout.devices import allocator
from flatout.errors import OutOfMemory
from flatout.measure import ROUGH, TrialResult, fingerprint, usable_cpus
from flatout.models import (
    find_rewrites,
    fused_norms_of,
    has_compiled,
    may_be_slower_in_bf16,
    uses_convolution,
)
from flatout.recipe import (
    SETTINGS,
    Choice,
    ModelFacts,
    Parity,
    Recipe,
    ResolvedRecipe,
    of_change,
    phrase,
)
from flatout.strategies import others_to_try
from flatout.train.graphs.graphs import graphs_of
from flatout.train.losses.loss_value import Compute
from flatout.train.micro_batch import forget_frames, is_out_of_memory
from flatout.train.settings import Settings, Switch
from flatout.train.step import Stepper
from flatout.train.tables.row_tables import Tables
from flatout.train.terms import TERMS, Terms, is_ampere
from flatout.train.tuning import decision_cache
from flatout.train.tuning.budget import Budget
from flatout.train.tuning.compile_trial import FIELD as CAPTURE
from flatout.train.tuning.compile_trial import NOT_YET, BackgroundCompile
from flatout.train.tuning.crash_markers import Marks
from flatout.train.tuning.first_check import NOTHING_KNOWN, FirstCheck, KnownStep
from flatout.train.tuning.frozen_precision import (
    Found,
    PlannedRun,
    choose_precision,
    has_short_epochs,
)
from flatout.train.tuning.search import COUNT, Option, Search, is_faster
from flatout.words import duration
from flatout.world import ONE, World, place

# Minimum number of steps of a run in which settings are tried if each step is long.
_FEWEST_LONG = 16
# Limits for measuring the machine's best rates. _RATES_S: maximum seconds. _RATES_SHARE: maximum
# fraction of the run's time.
_RATES_S, _RATES_SHARE = 3.0, 0.01
# Reasons to try nothing. _KEPT_FIRST: features are kept from the start. _TOO_SLOW: the check of a
# few samples would take too long.
_KEPT_FIRST = "features of frozen layers are kept from the start, and no settings are tried before"
_TOO_SLOW = "a step on a few samples takes too long to try other settings before the first step"
COMPILE, GRAPH = "compute.compile", "compute.cuda_graph"
BENCHMARK = "compute.cudnn_benchmark"
# Approximate seconds that cuDNN takes to try algorithms for a convolution and its backward.
_BENCHMARK_S = 0.1
_REDRAWS = 'would draw other random numbers, as for dropout: allow="redrawn" permits it'
# Reason against compiling the whole step if the model draws random numbers.
_DRAWS = "the model draws random numbers"
# Reasons of settings in a Recipe. MEASURING: a trial is running. _NOT_MEASURED: the run ended
# during the trial.
MEASURING, _NOT_MEASURED = "being measured", "was not measured: the run ended"

# Order of trials: options that help other options come first, then options with large effects.
_ORDER = {
    field: place
    for place, field in enumerate(
        ("compute.precision", "compute.memory_format", "compute.fused_norms", "compute.rewrites")
    )
}

Choices = dict[str, Choice]


@dataclass
class Decision:
    """The Recipe to start with, and the search that runs during training.

    Attributes:
        recipe: a concrete Recipe, with plain values for settings that are still to be tried.
        search: the search for these settings, or None.
        facts: facts about the model, as from `facts_of`.
        key: key of the cache entry.
        is_known: whether the Recipe comes from the cache.
    """

    recipe: ResolvedRecipe
    search: Search | None = None
    facts: ModelFacts = field(default_factory=ModelFacts)
    key: str = ""
    is_known: bool = False


def resolve(
    requested: Recipe,
    stepper: Stepper,
    compute: Compute | None,
    batches: list[Batch],
    facts: ModelFacts,
    allow: Parity,
    steps: int | None,
    say: Callable[[str], None],
    planned: PlannedRun | None = None,
    known: KnownStep = NOTHING_KNOWN,
    world: World | None = ONE,
    terms: Terms = TERMS,
) -> Decision:
    """Return the settings with which this job starts on this machine. All ranks call it."""
    budget = Budget(steps, terms)
    machine = fingerprint().as_dict()
    plain = _plain_choices(requested, stepper, allow)
    if compute is not None and batches:
        plain |= _rows_at_once(requested, stepper, batches[0], allow)
    start = requested.resolve(plain, machine, facts)
    if compute is None:
        return Decision(start)
    key = decision_cache.key(requested, stepper, batches, allow, steps) if batches else ""
    # A compiled model would be compiled again in a child process.
    switch = stepper.switch
    may_fork = terms.may_fork and switch.device.type == "cpu" and not has_compiled(switch.model)
    marks = Marks() if world is None else Marks.of(key, world, may_fork=may_fork)
    if not batches:
        return Decision(start)
    cached = decision_cache.read(key)
    if cached is not None:
        say(_cached_line(cached, Settings.of(start)))
        return Decision(cached.recipe, _settled(cached, start, stepper, budget), facts, key, True)
    check = FirstCheck(stepper, compute, batches[0], Settings.of(start), budget, marks)
    given = (requested, stepper, batches[0], facts, allow, steps, say, planned, known)
    return _without_ended(_looked_at(check, plain, key, *given), requested, marks, say)


def _looked_at(
    check: FirstCheck,
    plain: Choices,
    key: str,
    requested: Recipe,
    stepper: Stepper,
    batch: Batch,
    facts: ModelFacts,
    allow: Parity,
    steps: int | None,
    say: Callable[[str], None],
    planned: PlannedRun | None,
    known: KnownStep,
) -> Decision:
    machine, began = fingerprint().as_dict(), check.budget.terms.clock()
    facts = check.facts(facts)
    if CAPTURE in plain and facts.draws_random:
        plain[CAPTURE] = _choice("off", _DRAWS, Parity.EXACT)
    start = requested.resolve(plain, machine, facts)
    if not _is_open(requested, allow):
        return Decision(start)
    found: Found | None = None
    try:
        if planned is not None and has_short_epochs(planned, batch.size):
            options = _options(requested, stepper, batch, facts, allow, check.budget.terms)
            found = _precision(check, options, facts, planned)
            if found.is_frozen:
                start = requested.resolve({**plain, **found.choices}, machine, facts)
                say(f"auto: {start.summary()}; {found.why or _KEPT_FIRST}")
                _keep(key, start, found)
                return Decision(start)
        search, why_not = _checked(
            check, requested, stepper, batch, facts, allow, steps, began, known
        )
    except (RuntimeError, MemoryError) as error:
        # A forward and backward pass for checks ran out of memory; plain steps may still fit.
        if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
            raise
        forget_frames(error)
        search, why_not = None, "memory does not suffice to try other settings"
    if search is None:
        if planned is not None and why_not in (_TOO_SLOW, _too_short(steps)):
            if found is None:
                options = _options(requested, stepper, batch, facts, allow, check.budget.terms)
                found = _precision(check, options, facts, planned)
            start = requested.resolve({**plain, **found.choices}, machine, facts)
            why_not = found.why or why_not
            _keep(key, start, found)
        if why_not:
            say(f"auto: {start.summary()}; {why_not}")
        return Decision(start)
    if stepper.switch.device.type == "cuda" and search.dropped.get("compute.precision") == _REDRAWS:
        say(f"auto: bf16 is not tried: it {_REDRAWS}")  # the largest gain that most models have
    return Decision(start, search, facts, key)


def _without_ended(
    decision: Decision, requested: Recipe, marks: Marks, say: Callable[[str], None]
) -> Decision:
    start, ended = decision.recipe, _ended(requested, marks)
    for name, why in ended.items():
        trial = SETTINGS[name].trial
        say(f"auto: {phrase(name, trial.value) if trial else name} {why}")
    if ended:
        choices = {f: start.choices[f].model_copy(update={"reason": w}) for f, w in ended.items()}
        decision.recipe = requested.resolve({**start.choices, **choices}, start.machine)
    return decision


def _ended(requested: Recipe, marks: Marks) -> dict[str, str]:
    """Return the open fields that ended earlier runs, with the reason."""
    found = {f: marks.objection([f]) for f in SETTINGS if requested.get(f) == "auto"}
    return {field: why for field, why in found.items() if why}


def _precision(
    check: FirstCheck, options: list[Option], facts: ModelFacts, planned: PlannedRun
) -> Found:
    try:
        return choose_precision(check, options, facts, planned)
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            raise
        return Found({})  # the real first step will fail in the same way


def _keep(key: str, start: ResolvedRecipe, found: Found) -> None:
    """Store the choice for the next run, since kept features need the same precision and layout."""
    if found.choices:
        decision_cache.write(key, start)


def _checked(
    check: FirstCheck,
    requested: Recipe,
    stepper: Stepper,
    batch: Batch,
    facts: ModelFacts,
    allow: Parity,
    steps: int | None,
    began: float,
    known: KnownStep,
) -> tuple[Search | None, str]:
    budget, plain = check.budget, check.plain
    options = _options(requested, stepper, batch, facts, allow, check.budget.terms)
    is_cpu = stepper.switch.device.type == "cpu"  # on other devices, CPU threads hardly matter
    threads = requested.get("process.threads") == "auto" and allow >= Parity.TOLERANT and is_cpu
    # Dropout keyed by sample does not work in compiled code.
    compiles = (
        requested.get(COMPILE) == "auto"
        and not stepper.chain.acts_within
        and of_change(COMPILE, "off", "on", facts) <= allow
    )
    captures = requested.get(CAPTURE) == "auto" and of_change(CAPTURE, "off", "on", facts) <= allow
    if captures and facts.draws_random:
        captures, check.dropped[CAPTURE] = False, _DRAWS
    if captures and batch.is_jagged:
        captures, check.dropped[CAPTURE] = False, NO_ROWS
    check.dropped |= (ended := _ended(requested, check.marks))
    options = [option for option in options if option.field not in ended]
    threads &= "process.threads" not in check.dropped
    compiles &= COMPILE not in check.dropped
    captures &= CAPTURE not in check.dropped
    graphs = graphs_of(stepper).cuda
    if graphs is not None and (why := graphs.objection(check.compute, (batch,))):
        check.dropped[GRAPH] = why
    check.dropped |= _redrawn(requested, stepper, batch, facts, allow, budget.terms)
    counts = _counts(requested, batch, facts, allow) if COUNT not in check.dropped else ((), ())
    if not (options or threads or compiles or captures or any(counts)):
        return None, ""
    fewest = _FEWEST_LONG if check.may_be_slow else budget.terms.fewest_steps
    if steps is not None and steps < fewest:
        return None, _too_short(steps)
    check.time_step(known)
    budget.before_s += budget.terms.clock() - began
    try:
        if not check.of(options, facts):
            is_long = steps is not None and budget.before_limit_s == budget.terms.longest_s
            return None, _TOO_SLOW if is_long else _too_short(steps)
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            raise
        return None, "the first step fails"  # the real first step will fail in the same way
    tries = any(option.field == BENCHMARK for option in options)
    if tries and not budget.pays_for(_BENCHMARK_S * _convolutions(stepper.switch.model)):
        check.dropped[BENCHMARK] = "the run is too short to repay trying algorithms"
    search = Search(
        plain,
        [one for one in options if one.field not in check.dropped],
        budget,
        modules=sum(1 for _ in stepper.switch.model.modules()),
        threads=threads,
        compiles=compiles,
        captures=captures and is_cpu,
        counts=counts,
        few_s=check.few_s,
        starts_cold=check.starts_cold,
        fastest=check.fastest,
        dropped=check.dropped,
        slower=check.slower,
        unchecked=check.unchecked,
        check=partial(check.of_step, facts=facts),
        marks=check.marks,
    )
    if compiles and (trial := SETTINGS[COMPILE].trial) is not None:
        search.unchecked.append(Option(COMPILE, trial))
    return search, ""


def _cached_line(cached: decision_cache.KeptSettings, plain: Settings) -> str:
    line = f"auto: {cached.recipe.summary()} (measured {cached.when:%Y-%m-%d}, from the cache)"
    return line if cached.by_length is None else f"{line}; {cached.by_length.words(plain)}"


def _settled(
    cached: decision_cache.KeptSettings, start: ResolvedRecipe, stepper: Stepper, budget: Budget
) -> Search | None:
    choice = cached.recipe.choices.get(CAPTURE)
    captures = budget.steps is None and choice is not None and choice.reason == NOT_YET
    if stepper.world.size > 1 or not (captures or cached.by_length is not None):
        return None
    search = Search(Settings.of(start), [], budget, captures=captures, is_settled=True)
    search.best, search.by_length = Settings.of(cached.recipe), cached.by_length
    return search


def seconds_of(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds that `run` takes by a clock."""
    began = clock()
    run()
    return clock() - began


def _too_short(steps: int | None) -> str:
    if steps is None:
        return "a step takes too long to measure in a run of unknown length"
    return f"a run of {steps} steps is too short to repay measuring"


def know_machine(search: Search, device: torch.device) -> None:
    """Measure this machine's best rates before a run that is long enough for it.

    The rates are measured once, and again if the machine was busy at the previous measurement.
    """
    budget, terms, threads = search.budget, search.budget.terms, torch.get_num_threads()
    if budget.run_s * _RATES_SHARE < _RATES_S or not budget.pays_before(_RATES_S):
        return
    known = terms.known_rates(device.type, threads)
    if known is None or known["spread"] > ROUGH:
        run = partial(terms.machine_rates, device.type, threads)
        budget.before_s += seconds_of(run, terms.clock)


def agree(decision: Decision, world: World) -> None:
    """Make all ranks try the same options in the same order, except any that fail on a rank."""
    search = decision.search
    own = None
    if search is not None:
        own = [
            [option.field for option in search.options],
            search.dropped,
            search.slower,
            [option.field for option in search.unchecked],
            search.budget.before_s,
            search.budget.step_s,
            search.budget.input_s,
            None if search.fastest is None else sorted(search.fastest),
        ]
    found = world.gather(own)
    if search is None or any(one is None for one in found):
        decision.search = None
        return
    for fields, dropped, slower, *_ in found:
        search.options = [option for option in search.options if option.field in fields]
        search.dropped.update(dropped)
        search.slower |= {k: max(v, search.slower.get(k, v)) for k, v in slower.items()}
    is_known = all(one[7] is not None for one in found)
    search.fastest = frozenset(found[0][7]) if is_known else None
    asked = {field for one in found for field in one[3]}
    known = {option.field: option for option in [*search.options, *search.unchecked]}
    search.unchecked = [option for field, option in known.items() if field in asked]
    if search.captures:
        search.captures = False
        search.dropped[CAPTURE] = "that is for one rank on a CPU"
    budget = search.budget
    budget.before_s, budget.step_s, budget.input_s = (
        max(one[i] for one in found) for i in (4, 5, 6)
    )


def started(running: ResolvedRecipe, requested: Recipe, search: Search) -> ResolvedRecipe:
    """Return the Recipe during a search: settings under trial have the reason "being measured"."""
    choices = {
        option.field: running.choices[option.field].model_copy(update={"reason": MEASURING})
        for option in search.options
    }
    if any(search.counts):
        choices[COUNT] = _choice(search.plain.micro_batches, MEASURING, Parity.EXACT)
    if search.captures and not search.is_settled:
        choices[CAPTURE] = _choice(search.plain.capture, MEASURING, Parity.EXACT)
    return requested.resolve({**running.choices, **choices}, running.machine)


def being_measured(recipe: ResolvedRecipe) -> list[str]:
    """Return fields of a Recipe that was written before its search was over."""
    return [field for field, choice in recipe.choices.items() if choice.reason == MEASURING]


def settle(
    decision: Decision,
    running: ResolvedRecipe,
    requested: Recipe,
    ended: str,
    *,
    suffices: bool = False,
    pending: bool = False,
) -> tuple[ResolvedRecipe, str]:
    """Return the Recipe that a search has found and a line for the user; cache the Recipe.

    The line is "" if the run ended before anything was measured.

    Args:
        decision: the decision whose search has ended.
        running: the Recipe so far, with settings that were decided elsewhere.
        requested: the Recipe that `resolve` was given.
        ended: the reason for an early end of the search; "" without one.
        suffices: whether the result is cached in spite of an early end.
        pending: whether the step is still to be compiled, so that the result is not final.
    """
    search = decision.search
    assert search is not None
    found = _choices(search, decision.facts)
    if pending:
        found[CAPTURE] = _choice("off", MEASURING, Parity.EXACT)
    resolved = requested.resolve({**running.choices, **found}, running.machine, decision.facts)
    parity = max(choice.parity for choice in found.values()) if found else Parity.EXACT
    cost = f"tuning cost {search.budget.cost_s:.1f} s"
    if search.stays:
        line = f"auto: {resolved.summary()}, as before; {cost}"
    elif search.measured_nothing:
        line = f"auto: {resolved.summary()}, as before: {search.late}; {cost}"
    elif search.best == search.plain:
        line = f"auto: nothing measured faster than plain; {cost}"
    elif search.whole is None:
        chosen = search.best.other_than(search.plain)
        why = "each measured faster"
        if not chosen.keys() <= search.results.keys():
            why = "each measured faster, now or before"
        line = f"auto: {resolved.summary()}: {why}; {cost}; result: {parity.words}"
    else:
        words = search.whole.words
        line = (
            f"auto: {resolved.summary()}: {words} faster than plain; {cost}; result: {parity.words}"
        )
    if search.by_length is not None:
        line += f"; {search.by_length.words(search.plain)}"
    if ended:
        line = f"{line}; {ended} before all settings were tried" if search.trials else ""
    if pending or (ended and not suffices) or search.measured_nothing:
        return resolved, line
    if search.disturbed or search.stays:
        line += "; the machine is busy, so the next run measures again"
    elif search.trials or not (search.lacked_time or _is_any_left(search)):
        decision_cache.write(decision.key, resolved, search.by_length)
    return resolved, line


def captured_line(search: Search, beside: BackgroundCompile) -> str:
    """Return the line about a step compiled during the run; "" where the graph is not used."""
    trial = search.results.get(CAPTURE)
    if search.best.capture != "on" or trial is None:
        return ""
    return (
        f"auto: captured step: {trial.words} faster than without; compiled in "
        f"{duration(beside.seconds)} during the steps, which cost them "
        f"{duration(max(0.0, beside.cost_s) + beside.traced_s)}; result: rounding"
    )


# -- options that may be tried ---------------------------------------------------------------------

_MEASURED = [name for name, one in SETTINGS.items() if one.trial and one.trial.why]


def _is_open(requested: Recipe, allow: Parity) -> bool:
    fields = [*_MEASURED, CAPTURE]
    if allow >= Parity.TOLERANT:
        fields += ["process.threads", *([COUNT] if requested.world.strategy == "staged" else [])]
    return any(requested.get(field) == "auto" for field in fields)


def _counts(
    requested: Recipe, batch: Batch, facts: ModelFacts, allow: Parity
) -> tuple[Sequence[int], Sequence[int]]:
    asked, ranks = requested.world, place().world_size
    is_open = asked.micro_batches == "auto" and asked.batch_statistics == "whole"
    if ranks == 1 or asked.strategy != "staged" or not is_open:
        return (), ()
    if of_change(COUNT, SETTINGS[COUNT].plain, 1, facts) > allow:
        return (), ()
    stages = asked.stages or ranks
    return others_to_try(stages, max(1, batch.size * stages // ranks))


def _plain_choices(requested: Recipe, stepper: Stepper, allow: Parity) -> Choices:
    usable = usable_cpus()
    fewer = usable < torch.get_num_threads() and allow >= Parity.TOLERANT
    choices = {}
    for name, setting in SETTINGS.items():
        if requested.get(name) == "auto":
            ask = setting.unmeasured
            value, why = ask(stepper.switch) if ask else (setting.plain, "plain")
            choices[name] = _choice(value, why, Parity.EXACT)
    if fewer and "process.threads" in choices:
        choices["process.threads"] = _choice(usable, "the usable CPUs", Parity.TOLERANT)
    return choices


def _rows_at_once(requested: Recipe, stepper: Stepper, batch: Batch, allow: Parity) -> Choices:
    field = "compute.touched_rows"
    is_open = requested.get(field) == "auto" and allow >= Parity.TOLERANT
    if not is_open or stepper.switch.device.type != "cpu":
        return {}
    if stepper.switch.now.touched_rows == "on":  # set by an earlier job of this run
        return {field: _choice("on", "as before", Parity.TOLERANT)}
    tables = Tables.of(stepper.switch.model, stepper.switch.optimizers)
    if not tables.outgrow(batch, surely=True):
        return {}
    return {field: _choice("on", tables.share_words(batch), Parity.TOLERANT)}


class _Job:
    """Properties of the model and the machine that decide which settings may be tried."""

    def __init__(self, switch: Switch, batch: Batch, terms: Terms) -> None:
        device = switch.device
        may_step_rows = device.type == "cpu" and switch.now.touched_rows == "off"
        self.has_large_tables = may_step_rows and Tables.of(
            switch.model, switch.optimizers
        ).outgrow(batch)
        self.has_gpu = device.type == "cuda"
        # Autocast affects neither float64 nor complex numbers, and bf16 models gain nothing.
        is_fp32 = any(p.dtype is torch.float32 for p in switch.model.parameters())
        self.could_use_bf16 = is_fp32 and terms.has_bf16_units(device)
        is_plain = switch.now.matmul_precision == "highest"
        self.has_tf32_units = is_plain and self.has_gpu and is_ampere(device)
        self.has_convolutions = uses_convolution(switch.model)
        self.has_cudnn_choices = (
            self.has_gpu and self.has_convolutions and switch.now.cudnn_benchmark == "off"
        )
        self.can_graph = self.has_gpu and place().world_size == 1
        self.may_be_slower_in_bf16 = (
            device.type == "cpu" and self.could_use_bf16 and may_be_slower_in_bf16(switch.model)
        )
        self.has_fused_norms = device.type == "cpu" and bool(fused_norms_of(switch.model))
        self.has_rewrites = bool(find_rewrites(switch.model))
        self.can_fuse = any(map(switch.can_fuse, switch.optimizers))
        keeps = switch.now.allocator == "keep"
        self.returns_memory = device.type == "cpu" and allocator.supported() and not keeps


def _options(
    requested: Recipe,
    stepper: Stepper,
    batch: Batch,
    facts: ModelFacts,
    allow: Parity,
    terms: Terms,
) -> list[Option]:
    votes = decision_cache.chosen_here()
    fitting = _fitting(requested, stepper, batch, terms)
    options = [one for one in fitting if _parity(one, facts) <= allow]
    return sorted(options, key=lambda option: (-votes[option.field], _ORDER.get(option.field, 9)))


def _fitting(requested: Recipe, stepper: Stepper, batch: Batch, terms: Terms) -> list[Option]:
    job = _Job(stepper.switch, batch, terms)
    return [
        Option(field, trial)
        for field in _MEASURED
        if (trial := SETTINGS[field].trial) is not None
        and requested.get(field) == "auto"
        and trial.fits(job)
    ]


def _parity(option: Option, facts: ModelFacts) -> Parity:
    return of_change(option.field, "plain", option.value, facts)


def _redrawn(
    requested: Recipe,
    stepper: Stepper,
    batch: Batch,
    facts: ModelFacts,
    allow: Parity,
    terms: Terms,
) -> dict[str, str]:
    if allow is not Parity.TOLERANT:
        return {}
    fields = [
        option.field
        for option in _fitting(requested, stepper, batch, terms)
        if _parity(option, facts) is Parity.REDRAWN
    ]
    return dict.fromkeys(fields, _REDRAWS)


def _convolutions(model: nn.Module) -> int:
    return sum("Conv" in type(module).__name__ for module in model.modules())


def _is_any_left(search: Search) -> bool:
    return any(option.field not in search.dropped for option in search.options)


# -- results ---------------------------------------------------------------------------------------


def _choices(search: Search, facts: ModelFacts) -> Choices:
    choices = {}
    for option in search.options:
        trial, plain = search.results.get(option.field), getattr(search.plain, option.setting)
        if getattr(search.best, option.setting) == option.value:
            parity = of_change(option.field, "plain", option.value, facts)
            why = _evidence(search, option)
            choices[option.field] = _choice(option.value, why, parity, trial or search.together)
        else:
            words = "one thread" if option.field == "process.threads" else option.value
            words = f"{words} micro-batches" if option.field == COUNT else words
            why = f"{words} {_objection(search, option)}"
            choices[option.field] = _choice(plain, why, Parity.EXACT)
    for name, why in search.dropped.items():
        if name in SETTINGS and name not in choices:
            plain = getattr(search.plain, name.partition(".")[2])
            choices[name] = _choice(plain, why, Parity.EXACT)
    if any(search.counts) and COUNT not in choices:
        choices[COUNT] = _choice(search.plain.micro_batches, _NOT_MEASURED, Parity.EXACT)
    if search.captures and CAPTURE not in choices:
        choices[CAPTURE] = _choice(search.plain.capture, _NOT_MEASURED, Parity.EXACT)
    return choices


def _evidence(search: Search, option: Option) -> str:
    if option.setting == "allocator":
        return "page faults a step: {:,.0f} before, {:,.0f} after".format(*search.faults)
    if option.setting == "compile":
        return f"compiled in {search.compile_s:.0f} s"
    trial = search.results.get(option.field)
    if trial is not None:
        part = "" if is_faster(trial) else "; won together with the others"
        return option.trial.why + part
    if option.field in search.kept:
        return f"{option.trial.why}; {search.kept[option.field]}"
    return f"{option.trial.why}; measured together with the others"


def _objection(search: Search, option: Option) -> str:
    trial = search.results.get(option.field)
    if trial is None:
        return search.dropped.get(option.field, _NOT_MEASURED)
    if is_faster(trial):
        return f"measured {trial.words}, but all choices together are not faster than plain"
    return f"measured {trial.words}: not faster"


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
