"""What must hold before several ranks train one model, and while they do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from flatout.console import say
from flatout.data import Batch, OwnPipe, Pipeline, Source, is_pipe, listed, named_tensors, own_pipe
from flatout.data.ranked import ranked
from flatout.errors import DataError, ModelError, WorldError
from flatout.models import has_own_moments, modules_of
from flatout.strategies import digest_of
from flatout.world import World


def agreed(source: Source, world: World) -> Source:
    """The source, of which all ranks know how many steps it makes; of pipes, this rank's own."""
    own = _own_pipe(source, world)
    if own is not None:
        return own
    return source.agreed(world.gather) if isinstance(source, Pipeline) else source


def _own_pipe(source: Source, world: World) -> Pipeline | None:
    """What this rank of several reads of its pipe; None for other sources, and on one rank."""
    if world.size == 1 or not is_pipe(source):
        return None
    return own_pipe(source, world.rank, world.size, world.gather)


def check_ranks(model: nn.Module, data: Source | None, world: World) -> None:
    """Refuse what would train another model than one rank does.

    Raises:
        ModelError: a layer works on each rank's part of a batch in a way that cannot be joined.
        WorldError: the ranks have different data.
    """
    if world.size == 1:
        return
    for module in modules_of(model):
        _check_layer(module)
    if data is None:
        return
    own = (data.digest, data.batch_size, data.steps, data.describe())
    values = world.gather(own)
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


def _check_names(data: Pipeline, world: World) -> None:
    """Refuse rows of the ranks' own in which one number means different classes or texts."""
    names = world.gather((list(data.classes or ()), data.texts))
    for rank, theirs in enumerate(names):
        if theirs != names[0]:
            ours, others = (
                listed(classes) or f"columns {listed(list(texts))}"
                for classes, texts in (names[0], theirs)
            )
            raise WorldError(
                f"ranks 0 and {rank} number classes or texts differently",
                where=f"rank 0: {ours}\n  rank {rank}: {others}",
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
    source: Source, world: World, say: Callable[[str], None] = say, *, whole: bool = False
) -> Source:
    """What this rank reads of a source.

    Where an iterator of the user's own decides the order, the ranks compare an epoch's first batch.
    Of pipes each rank reads its own, and all end an epoch together.

    Args:
        source: the same on all ranks.
        world: of this rank.
        say: gets a line about what is left over in pipes, on all ranks.
        whole: every rank reads each batch whole, as stages of one model do.

    Raises:
        DataError: ranks read whole batches, and the source has other rows for each.
        WorldError: while reading, on every rank: they have read different batches.
    """
    if whole and isinstance(source, Pipeline) and (source.has_own_rows or is_pipe(source)):
        raise DataError(
            "with world.strategy=staged every rank reads the same batches, and these data have "
            "other rows for each rank",
            do="leave shard out and read files, or train with world.strategy=ddp or fsdp",
        )
    own = _own_pipe(source, world)
    if own is not None:
        return OwnPipe(own, partial(_dry, world), world.gather, say)
    look = None if source.seekable else partial(_check_same_batch, world=world)
    return ranked(source, world.rank, world.size, look, whole=whole)


def _dry(world: World, is_dry: bool) -> int:
    """How many ranks have come to the end of their pipes."""
    count = torch.tensor([int(is_dry)])
    world.sum(count, "whether a pipe has run dry")
    return int(count)


def _check_same_batch(batch: Batch, world: World) -> None:
    digests = world.gather([digest_of(tensor) for _, tensor in named_tensors("", batch[:3])])
    for rank, theirs in enumerate(digests):
        if theirs != digests[0]:
            raise WorldError(
                f"ranks 0 and {rank} have read different batches, so samples would be missing and "
                "others come twice",
                do="seed what shuffles the data alike on all ranks, such as "
                "DataLoader(generator=torch.Generator().manual_seed(0)), or pass arrays, a Dataset "
                "or a source of flatout.data, whose order Flatout decides",
            )


def _words(own: tuple[object, ...]) -> str:
    return f"{own[3]}, batches of {own[1]}, {own[2]} an epoch"
