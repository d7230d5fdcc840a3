"""Decisions of `Loop.prepare` on the first batches: the settings of steps, and the strategy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial

import torch

from flatout.data import Batch, features_give_way, samples_of_all
from flatout.devices import keep_matmul_precision
from flatout.errors import FlatoutError, ModelError
from flatout.models import adapter_of, facts_of
from flatout.recipe import (
    PLAIN,
    SETTINGS,
    Choice,
    ModelFacts,
    Parity,
    Recipe,
    ResolvedRecipe,
    dumps,
    loads,
    of_change,
)
from flatout.strategies import (
    LEFT_OUT,
    AsynchronousServers,
    Ddp,
    Fsdp,
    FsdpKeras,
    LocalSgd,
    OwnBuffers,
    Reduction,
    Shared,
    Strategy,
    SynchronousServers,
    reduction_of,
)
from flatout.train import device_data, named_rows
from flatout.train.checks import MISFITS, check_first_batch
from flatout.train.graphs.cuda_graph import CudaGraphs
from flatout.train.graphs.graphs import Graphs
from flatout.train.loop_state import LoopState
from flatout.train.losses.loss_value import Compute
from flatout.train.micro_batch import estimate_pieces
from flatout.train.part import Part
from flatout.train.sample_dropout import DropoutBySample, sample_dropout
from flatout.train.settings import Settings, Switch
from flatout.train.sharded_tables import SHARDED, read_whole, shards_of, shards_tables
from flatout.train.snapshot import untouched
from flatout.train.split_tables import SPLIT, check_split, splits_tables
from flatout.train.step import Stepper
from flatout.train.stragglers import Pace
from flatout.train.tuning import auto
from flatout.train.tuning.auto import Decision
from flatout.train.tuning.first_check import KnownStep
from flatout.train.tuning.frozen_precision import PlannedRun

# Number of samples in the first check, if the forward of a whole batch would take long.
_CHECKED = 4


def make_stepper(
    loop: LoopState, compute: Compute | None, first: list[Batch], order: Sequence[type[Part]]
) -> tuple[Stepper, ModelFacts]:
    """Return the Stepper of a Loop with the Parts within a step, and the facts of the model.

    Args:
        loop: the Loop that is being prepared.
        compute: forward and loss of a batch; None where they are not known.
        first: the first batches of this rank.
        order: classes of all Parts, the outermost first.
    """
    keyed, facts = sample_dropout(
        loop.asked.recipe,
        loop.model,
        loop.asked.seed,
        compute,
        first,
        facts_of(loop.model, str(loop.device)),
        loop.world,
        loop.say,
    )
    if keyed is not None:
        loop.undo.callback(keyed.close)
    stepper = Stepper(
        Switch(loop.model, loop.optimizers, loop.device),
        clip_norm=loop.asked.clip[0],
        clip_value=loop.asked.clip[1],
        micro_batch=loop.asked.recipe.memory.micro_batch,
        order=order,
    )
    if keyed is not None:
        stepper.chain.add(DropoutBySample(stepper, keyed))
    stepper.switch.splits_tables = splits_tables(loop.asked.recipe)
    _note_undo(loop, stepper)
    graphs = Graphs(stepper)
    is_asked = loop.asked.recipe.compute.cuda_graph == "on"
    if is_asked or loop.device.type == "cuda":
        graphs.cuda = CudaGraphs(stepper, loop.note, is_asked)
        loop.undo.callback(graphs.cuda.close)
    stepper.chain.add(graphs)
    stepper.frees_memory.append(features_give_way)
    asked = loop.asked.recipe.world
    apart = asked.staleness != "sync" or asked.spare_workers > 0
    alone = asked.strategy in ("local_sgd", "staged") or apart
    if loop.world.size > 1 and not alone:
        stepper.meet(loop.world)
    return stepper, facts


def decide(
    loop: LoopState,
    facts: ModelFacts,
    compute: Compute | None,
    first: list[Batch],
    steps: int | None,
) -> tuple[ResolvedRecipe, Decision]:
    """Resolve the Recipe on the first batches and switch the stepper to it.

    Returns the resolved Recipe, and the decision with the search that runs during training.
    """
    estimated, looked_s = 1, 0.0
    if compute is not None and not loop.is_staged:
        estimated = _agree_on_pieces(loop, compute, first, 1)
    if first and compute is not None:
        looked_s = _check_first(loop, compute, first)
    known = KnownStep(looked_s, loop.first_batches.seconds, loop.asked.accumulate)
    decision = _decision(loop, facts, compute, first, steps, known)
    if _has_spare_workers(loop):
        decision.search = None  # a search needs steps that wait for all ranks
    resolved = _with_device(loop, _with_reasons(loop, decision.recipe), facts)
    resolved = _with_device_data(loop, resolved, first)
    check_split(loop, resolved)
    if loop.world.size > 1:
        # Every rank has decided; the first rank's result holds for all ranks.
        result = loads(loop.world.from_first(dumps(resolved)))
        assert isinstance(result, ResolvedRecipe)
        loop.stepper.chain.add(Pace(loop.world.collectives))
        samples = sum(loop.world.gather(samples_of(first)))
        shards = shards_of(loop, result)
        loop.stepper.switch.shard(shards)
        if shards is not None:
            loop.stepper.switch.leave(read_whole(loop, compute, first))
        strategy, resolved = _strategy(loop, result, compute, first)
        loop.stepper.train_with(loop.world, samples, strategy)
        if not (strategy.steps_apart or loop.is_staged):
            loop.stepper.own_buffers = OwnBuffers(loop.model, loop.world, loop.say)
        auto.agree(decision, loop.world)
    elif decision.search is not None:  # several ranks would slow one another down
        auto.know_machine(decision.search, loop.device)
    loop.stepper.use(Settings.of(resolved))
    if compute is not None and estimated > 1:
        _agree_on_pieces(loop, compute, first, estimated)  # the settings may need less memory
        _note_pieces(loop, first)
    loop.stepper.begin()
    if decision.search is not None:
        resolved = auto.started(resolved, loop.asked.recipe, decision.search)
    return resolved, decision


def _check_first(loop: LoopState, compute: Compute, first: list[Batch]) -> float:
    source, own = loop.feed.source, loop.identity.trainer is None
    stepper = loop.stepper

    def check(pieces: list[Batch]) -> None:
        parameters = stepper.update.parameters
        stepper.takes_gradients = check_first_batch(
            loop.model, compute, pieces, source, is_own=own, parameters=parameters
        )

    if _planned(loop, first) is not None and first[0].size > _CHECKED:
        with suppress(FlatoutError, *MISFITS):
            stepper.look(first[0].rows(0, _CHECKED), check)
            return 0.0
    return auto.seconds_of(partial(stepper.look, first[0], check), loop.terms.clock)


def samples_of(batches: Sequence[Batch]) -> float:
    """Return a batch's approximate number of samples, divided by the ranks that compute it too."""
    return batches[0].size / batches[0].copies if batches else 0.0


def _note_undo(loop: LoopState, stepper: Stepper) -> None:
    undo = loop.undo.callback
    undo(keep_matmul_precision())
    undo(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    undo(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    undo(stepper.switch.release)
    loop.undo.push(lambda _, error, __: stepper.close(error))
    if loop.asked.recipe.compute.deterministic:
        torch.use_deterministic_algorithms(True)


def _decision(
    loop: LoopState,
    facts: ModelFacts,
    compute: Compute | None,
    first: list[Batch],
    steps: int | None,
    known: KnownStep,
) -> Decision:
    kept = None if loop.resume is None else loop.resume.choices(loop.asked.recipe)
    if kept is not None:
        return Decision(loop.asked.recipe.resolve(*kept, facts))
    asked, planned = asked_here(loop), _planned(loop, first)
    asked = asked.replace({field: SETTINGS[field].plain for field in _left_out(loop)})
    return auto.resolve(
        asked,
        loop.stepper,
        compute,
        first,
        facts,
        loop.asked.allow,
        steps,
        loop.say,
        planned,
        known,
        # A rank that rejoins later decides alone.
        None if _has_spare_workers(loop) else loop.world,
        loop.terms,
    )


def _has_spare_workers(loop: LoopState) -> bool:
    return loop.has_servers and bool(loop.asked.recipe.world.spare_workers)


def _left_out(loop: LoopState) -> dict[str, str]:
    asked = loop.asked.recipe
    left_out = LEFT_OUT.get(loop.asked_strategy, {})
    return {field: why for field, why in left_out.items() if asked.get(field) == "auto"}


def _with_reasons(loop: LoopState, resolved: ResolvedRecipe) -> ResolvedRecipe:
    left = {
        field: Choice(value=SETTINGS[field].plain, reason=why, parity=Parity.EXACT)
        for field, why in _left_out(loop).items()
    }
    if not left:
        return resolved
    return loop.asked.recipe.resolve({**resolved.choices, **left}, resolved.machine)


def _planned(loop: LoopState, first: list[Batch]) -> PlannedRun | None:
    source = loop.feed.source
    if (
        loop.identity.trainer is None
        or source is None
        or not first
        or loop.progress.planned_epochs is None
    ):
        return None
    if first[0].indices is None or first[0].is_jagged or loop.lays_out:
        return None
    if isinstance(named_rows.samples_of(source), str):
        return None
    may_keep = loop.asked.recipe.input.features != "off" and loop.asked.allow >= Parity.TOLERANT
    samples = samples_of_all(source)
    if not (may_keep and samples and adapter_of(loop.model).is_partly_frozen()):
        return None
    return PlannedRun(samples, loop.progress.planned_epochs)


def asked_here(loop: LoopState) -> Recipe:
    """Return the requested Recipe with the real device, and with values that tables require."""
    asked = loop.asked.recipe
    needed = SHARDED if shards_tables(asked, loop.world) else {}
    needed = needed | SPLIT if splits_tables(asked) else needed
    open_ = {field: value for field, value in needed.items() if asked.get(field) == "auto"}
    if open_:
        asked = asked.replace(open_)
    if asked.world.device != "auto":
        asked = asked.replace({"world.device": str(loop.device)})
    return asked


def _with_device(loop: LoopState, resolved: ResolvedRecipe, facts: ModelFacts) -> ResolvedRecipe:
    name = str(loop.device)
    if resolved.world.device == name and loop.asked.recipe.world.device in ("auto", name):
        return resolved
    parity = of_change("world.device", PLAIN["world.device"], name, facts)
    choice = Choice(value=name, reason=loop.placed.why, parity=parity)
    choices = {**resolved.choices, "world.device": choice}
    return loop.asked.recipe.resolve(choices, resolved.machine, facts)


def _with_device_data(
    loop: LoopState, resolved: ResolvedRecipe, first: list[Batch]
) -> ResolvedRecipe:
    asked = loop.asked.recipe.input.on_device
    if asked == "off":
        return resolved
    frozen = _planned(loop, first) is not None
    choice = device_data.choose(asked, loop.feed.source, loop.device, frozen=frozen)
    choices = {**resolved.choices, device_data.FIELD: choice}
    return loop.asked.recipe.resolve(choices, resolved.machine)


def _reduction(loop: LoopState, resolved: ResolvedRecipe) -> tuple[Reduction, ResolvedRecipe]:
    asked, is_exact = loop.asked.recipe.world, loop.asked.allow < Parity.TOLERANT
    reduction = reduction_of(asked, loop.world, loop.device, exact=is_exact)
    if asked.reduction != "auto" or not isinstance(reduction, Shared):
        return reduction, resolved
    return reduction, _shared(loop, resolved)


def _shared(loop: LoopState, resolved: ResolvedRecipe) -> ResolvedRecipe:
    parity = Parity.EXACT if loop.world.size == 2 else Parity.TOLERANT
    why = "all ranks share one node's memory"
    choice = Choice(value="shared", reason=why, parity=parity)
    choices = {**resolved.choices, "world.reduction": choice}
    return loop.asked.recipe.resolve(choices, resolved.machine)


def _parts(
    loop: LoopState, resolved: ResolvedRecipe, compute: Compute | None, first: list[Batch]
) -> tuple[Strategy, ResolvedRecipe]:
    world, model, wanted = loop.world, loop.model, loop.asked.recipe.world.reduction
    run = None
    if compute is not None and first:
        run = partial(_run_first, loop, compute, first[0])
    shares = wanted != "all_reduce"
    exact = wanted != "shared" and loop.asked.allow < Parity.TOLERANT
    lays_out = Fsdp if adapter_of(model).calls_hooks else FsdpKeras
    result = lays_out(world, model, loop.optimizers, run, loop.tell, shares=shares, exact=exact)
    is_one_memory = world.place.nodes == 1 and loop.device.type == "cpu"
    if wanted == "auto" and is_one_memory and (world.size == 2 or not exact):
        resolved = _shared(loop, resolved)
    return result, resolved


def _strategy(
    loop: LoopState, resolved: ResolvedRecipe, compute: Compute | None, first: list[Batch]
) -> tuple[Strategy, ResolvedRecipe]:
    asked, world, model = resolved.world, loop.world, loop.model
    if asked.strategy == "fsdp":
        return _parts(loop, resolved, compute, first)
    if asked.strategy == "staged":
        return _stages(loop, resolved, compute, first), resolved
    if asked.strategy == "parameter_server":
        return _served(loop, resolved), resolved
    adds_up, resolved = _reduction(loop, resolved)
    reduction = adds_up.started(loop.device)
    if asked.strategy == "local_sgd":
        local = LocalSgd(
            world,
            model,
            loop.optimizers,
            reduction,
            every=asked.sync_every,
            outer=asked.outer == "nesterov",
        )
        return local, resolved
    return Ddp(world, model, reduction, loop.stepper.switch.shards), resolved


def _served(loop: LoopState, resolved: ResolvedRecipe) -> Strategy:
    asked = resolved.world
    given = (loop.world, loop.model, loop.optimizers, asked.servers, loop.tell)
    if asked.staleness == "sync" and not asked.spare_workers:
        return SynchronousServers(*given, clip=loop.asked.clip)
    bound = asked.staleness if isinstance(asked.staleness, int) else None
    return AsynchronousServers(*given, staleness=bound, spare=asked.spare_workers)


def _stages(
    loop: LoopState, resolved: ResolvedRecipe, compute: Compute | None, first: list[Batch]
) -> Strategy:
    # Imports torch's compiler, which takes a second.
    from flatout.strategies.staged import staged

    if compute is None or not first or loop.identity.trainer is None:
        raise ModelError(
            "world.strategy=staged is for a Trainer's fit: it measures the model's layers on the "
            "first batch, and calls the loss itself",
            do="train with flatout.Trainer, or with world.strategy=ddp or fsdp",
        )
    world = resolved.world
    own_statistics = world.batch_statistics == "per_micro_batch"
    asked = staged.StagedOptions(world.stages, world.schedule, own_statistics)
    casts = resolved.compute.precision != "fp32"
    within = loop.stepper.switch.autocast if casts else nullcontext
    given = (compute, first[0])
    return staged.Staged(loop.world, loop.model, loop.optimizers, given, asked, loop.tell, within)


def _run_first(loop: LoopState, compute: Compute, batch: Batch) -> None:
    with untouched(loop.model, compute), loop.stepper.forward_alone():
        loop.stepper.look(batch, lambda pieces: compute(pieces[0]))


def _agree_on_pieces(loop: LoopState, compute: Compute, first: list[Batch], known: int) -> int:
    if loop.device.type == "cpu" and loop.stepper.micro_batch == "auto":
        own = loop.stepper.pieces
        if first and own == known:
            own = estimate_pieces(loop.model, compute, first[0])
        loop.stepper.pieces = max(loop.world.gather(own))  # the maximum number that any rank needs
    return loop.stepper.pieces


def _note_pieces(loop: LoopState, first: list[Batch]) -> None:
    if first and loop.stepper.pieces > 1:
        loop.say(
            f"a batch of {first[0].size} would not fit in the free memory: "
            f"it runs in {loop.stepper.pieces} micro-batches, same global batch"
        )
