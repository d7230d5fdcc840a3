"""Check for a last batch with too few samples for the statistics of BatchNorm."""

from __future__ import annotations

from flatout.data import last_batch
from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, has_batch_norm, made, models, training_loaders
from flatout.doctor.edits import arguments
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation


@check(edit=arguments.drop_last)
def look(observation: Observation) -> Findings:
    """Report batches of one sample in the training of a model with BatchNorm."""
    if not has_batch_norm(models(observation)):
        return
    for loader in training_loaders(observation):
        if _last(loader, observation.world_size) == 1:
            yield Finding(
                kind="danger",
                what=f"{loader.length:,} samples in batches of {loader.batch_size} leave a last "
                "batch of one: BatchNorm takes its statistics from a single sample, or fails",
                do="DataLoader(..., drop_last=True), or a batch size that leaves more",
                where=at(made(loader)),
                parity="changes learning",
            )


def _last(loader: Loader, ranks: int) -> int:
    if loader.batch_size is None or loader.length is None:
        raise NoSignal("the number of samples, or the batch size, was not observed")
    samples = -(-loader.length // ranks) if loader.is_distributed else loader.length
    return last_batch(samples, loader.batch_size, bool(loader.drop_last))
