"""What must hold before several ranks train one model."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatout.data.pipeline import Pipeline
from flatout.data.source import Source
from flatout.errors import ModelError, WorldError
from flatout.world import World


def agreed(source: Source, world: World) -> Source:
    """The source, of which all ranks know how many steps it makes."""
    return source.agreed(world.gather) if isinstance(source, Pipeline) else source


def check_ranks(model: nn.Module, data: Source | None, world: World) -> None:
    """Refuse what would train another model than one rank does.

    Raises:
        ModelError: the model takes statistics over each rank's part of a batch.
        WorldError: the ranks have different data.
    """
    if world.size == 1:
        return
    for name, module in model.named_modules():
        if _takes_own_statistics(module):
            raise ModelError(
                f"{name} ({type(module).__name__}) takes its statistics over each rank's part of "
                "the batch, so several ranks would learn something else than one",
                do="use GroupNormalization or LayerNormalization, or train on one rank",
            )
    if data is None:
        return
    own = (data.digest, data.batch_size, data.steps, data.describe())
    found = world.gather(own)
    for rank, theirs in enumerate(found):
        if theirs[:3] != found[0][:3]:
            raise WorldError(
                f"ranks 0 and {rank} train on different data",
                where=f"rank 0: {_words(found[0])}\n  rank {rank}: {_words(theirs)}",
                do="give all ranks the same data: Flatout hands each its part of every batch",
            )


def _takes_own_statistics(module: nn.Module) -> bool:
    """Keras' own; those of torch are synchronised."""
    return type(module).__name__ == "BatchNormalization" and not isinstance(module, _BatchNorm)


def _words(own: tuple[object, ...]) -> str:
    return f"{own[3]}, batches of {own[1]}, {own[2]} an epoch"
