"""Checks, before and during training, that several ranks can train one model together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.data import DistributedSampler

from flatout.console import say
from flatout.data import (
    ArraySource,
    Batch,
    DatasetSource,
    IterableSource,
    OwnPipe,
    Pipeline,
    Source,
    differs_by_rank,
    is_pipe,
    listed,
    loose_digest,
    named_tensors,
    own_pipe,
    unlike_meaning,
)
from flatout.data.ranked import Share, ranked
from flatout.errors import DataError, ModelError, WorldError
from flatout.models import has_own_moments, modules_of
from flatout.strategies import digest_of
from flatout.train.held_state import HeldState
from flatout.world import World

Use: TypeAlias = Literal["train", "evaluate", "predict"]
# Number of batches to compare if the code of the data reads different values on different ranks.
_COMPARED = 2
_NO_ROWS = "the inputs of these batches have no row for each sample"


def agreed(source: Source, world: World) -> Source:
    """Return the source with an agreed number of steps; for pipes, this rank's own source."""
    own = _own_pipe(source, world)
    if own is not None:
        return own
    return source.agreed(world.gather) if isinstance(source, Pipeline) else source


def _own_pipe(source: Source, world: World) -> Pipeline | None:
    if world.size == 1 or not is_pipe(source):
        return None
    return own_pipe(source, world.rank, world.size, world.gather)


def check_ranks(
    model: nn.Module, data: Source | None, world: World, say: Callable[[str], None] = say
) -> None:
    """Refuse data and models for which training on several ranks would change the result."""
    if world.size == 1:
        return
    for module in modules_of(model):
        _check_layer(module)
    if data is None:
        return
    own = (data.digest, data.batch_size, data.steps, data.describe())
    values = world.gather(own)
    unlike = next((rank for rank, v in enumerate(values) if v[:3] != values[0][:3]), None)
    if unlike is not None and _give_the_same(data, values, world):
        say(
            f"the data of ranks 0 and {unlike} read different numbers or texts, such as a rank or "
            f"a path; their first {_COMPARED} batches are equal"
        )
        return
    if any(theirs[:3] != values[0][:3] for theirs in values) and _are_own(data, world):
        _check_same_steps(values)
        return
    for rank, theirs in enumerate(values):
        if theirs[:3] != values[0][:3]:
            alike = theirs[1:] == values[0][1:]
            raise WorldError(
                f"ranks 0 and {rank} train on different data" + ", of other values" * alike,
                where=f"rank 0: {_words(values[0])}\n  rank {rank}: {_words(theirs)}",
                do="give all ranks the same data: Flatout hands each its part of every batch"
                + "; what is drawn at random wants a seed" * alike,
            )
    if isinstance(data, Pipeline):
        _check_names(data, world)


def _give_the_same(data: Source, values: list[tuple[Any, ...]], world: World) -> bool:
    """Return whether data differ in plain values of their code alone, and give equal batches.

    All ranks have to call it together.
    """
    if any(theirs[1:3] != values[0][1:3] for theirs in values):
        return False
    if isinstance(data, ArraySource) or len(set(world.gather(loose_digest(data)))) > 1:
        return False
    held = HeldState(data, most_bytes=0)
    try:
        batches = data.peek(_COMPARED)
    finally:
        held.restore()
    own = [[digest_of(t) for _, t in named_tensors("", batch[:3])] for batch in batches]
    gathered = world.gather(own)
    return all(theirs == gathered[0] for theirs in gathered)


def _are_own(data: Source, world: World) -> bool:
    is_read = isinstance(data, (IterableSource, DatasetSource))
    return all(world.gather(is_read and any(batch.is_jagged for batch in data.peek(1))))


def _check_same_steps(values: list[tuple[Any, ...]]) -> None:
    for rank, theirs in enumerate(values):
        if theirs[2] != values[0][2]:
            raise WorldError(
                f"ranks 0 and {rank} have different numbers of batches in an epoch, and each step "
                "takes one batch of each rank",
                where=f"rank 0: {_words(values[0])}\n  rank {rank}: {_words(theirs)}",
                do="give each rank the same number of batches, as "
                "torch.utils.data.DistributedSampler does",
            )


def _check_names(data: Pipeline, world: World) -> None:
    """Refuse data in which the same number (a class or id) has different meanings on two ranks."""
    values = world.gather((list(data.classes or ()), data.meanings))
    classes, meanings = values[0]
    for rank, (others, found) in enumerate(values):
        words = unlike_meaning(meanings, found, "the data of rank 0")
        if others != classes:
            words = f"expected the classes {listed(classes)}, as on rank 0; found {listed(others)}"
        if words is not None:
            raise WorldError(
                f"ranks 0 and {rank} turn values into numbers differently: {words}",
                do="give the sources of all ranks one schema=, or the same classes= or categories=",
            )


def _check_layer(layer: Any) -> None:
    name = getattr(layer, "name", None) or type(layer).__name__
    if has_own_moments(layer):
        raise ModelError(
            f"{name} ({type(layer).__name__}) is a BatchNormalization with its own code, which "
            "takes its statistics over each rank's part of the batch, so several ranks would learn "
            "something else than one",
            do="use keras.layers.BatchNormalization as it is, or train on one rank",
        )
    if getattr(layer, "stateful", False) is True:
        raise ModelError(
            f"{name} ({type(layer).__name__}) is stateful: it keeps a state of each sample of a "
            "batch for the next batch, and ranks have parts of batches",
            do="set stateful=False, or train on one rank",
        )


def part_of(
    source: Source,
    world: World,
    say: Callable[[str], None] = say,
    *,
    whole: bool = False,
    use: Use = "evaluate",
) -> Source:
    """Return this rank's part of a source.

    If batches come ready-made and in random order, the ranks compare the first batch of an epoch.
    Jagged batches are not split: each rank trains on its own batches. Each rank reads its own pipe,
    and all ranks end an epoch together.
    """
    if whole and differs_by_rank(source):
        raise DataError(
            "with world.strategy=staged every rank reads the same batches, but these data have "
            "different rows for each rank",
            do="leave shard out and read files, or train with world.strategy=ddp or fsdp",
        )
    own = _own_pipe(source, world)
    if own is not None:
        return OwnPipe(own, partial(_dry, world), world.gather, say)
    look = None
    if not isinstance(source, (Pipeline, ArraySource)):
        parts, is_random = getattr(source, "own_parts", ()), not source.seekable
        shards = any(isinstance(part, DistributedSampler) for part in parts)
        look = partial(
            _share_of, world=world, whole=whole, use=use, is_random=is_random, shards=shards
        )
    ends = iter if use != "train" or source.steps else partial(_while_all_have, world, say)
    return ranked(source, world.rank, world.size, look, whole=whole, ends=ends)


def _dry(world: World, is_dry: bool) -> int:
    count = torch.tensor([int(is_dry)])
    world.sum(count, "whether a pipe has run dry")
    return int(count)


def _while_all_have(
    world: World, say: Callable[[str], None], batches: Iterator[Batch]
) -> Iterator[Batch]:
    while True:
        batch = next(batches, None)
        dry = _dry(world, batch is None)
        if batch is None or dry:
            if dry < world.size:
                say(f"the epoch ended when {dry} of {world.size} ranks had no more batches")
            return
        yield batch


def _share_of(
    batch: Batch, *, world: World, whole: bool, use: Use, is_random: bool, shards: bool
) -> Share:
    if not is_random and not batch.is_jagged:
        return "part"
    own = [digest_of(tensor) for _, tensor in named_tensors("", batch[:3])]
    values = world.gather([batch.is_jagged, own])
    other = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
    if all(is_jagged for is_jagged, _ in values):
        return _share_of_jagged(other, whole=whole, use=use)
    if other is not None:
        raise WorldError(
            f"ranks 0 and {other} have read different batches, so samples would be missing and "
            "others come twice",
            do="leave the DistributedSampler out: DataLoader(data, batch_size, shuffle=True, "
            "generator=torch.Generator().manual_seed(0)); each rank takes its part of every batch, "
            "and batch_size counts the samples of all ranks"
            if shards
            else "seed the shuffling of the data alike on all ranks, such as "
            "DataLoader(generator=torch.Generator().manual_seed(0)), or pass arrays, a Dataset "
            "or a source of flatout.data, whose order Flatout decides",
        )
    return "part"


def jagged_in_stages() -> DataError:
    """Return the error for jagged batches in a model with stages."""
    return DataError(
        f"world.strategy=staged cuts batches into micro-batches, and {_NO_ROWS}",
        do="train with world.strategy=ddp, each rank with a loader of its own",
    )


def _share_of_jagged(other: int | None, *, whole: bool, use: Use) -> Share:
    if whole:
        raise jagged_in_stages()
    if use == "train" and other is None:
        raise DataError(
            f"all ranks have read the same batch, and {_NO_ROWS}, by which it could be cut over "
            "the ranks",
            do="let each rank's loader give other samples: a DataLoader with "
            "sampler=torch.utils.data.DistributedSampler(data, num_replicas=place().world_size, "
            "rank=place().rank), with place of flatout.world",
        )
    if use == "predict" and other is not None:
        raise DataError(
            "predictions come in the order of the samples, and ranks that read batches of their "
            "own have no common order",
            do="give all ranks the same batches, or predict on one rank",
        )
    return "copy" if other is None else "own"


def _words(own: tuple[object, ...]) -> str:
    return f"{own[3]}, batches of {own[1]}, {own[2]} an epoch"
