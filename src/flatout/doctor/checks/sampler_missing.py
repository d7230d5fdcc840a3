"""Check for ranks that all train on the same samples."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import Findings, NoSignal, rank_check
from flatout.doctor.checks.signals import at, has_peers, made, training_loaders
from flatout.doctor.edits import loops
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation


@rank_check(edit=loops.share_samples)
def look(observations: Sequence[Observation]) -> Findings:
    """Report ranks with equal first batches, by their indices or by the bytes of a stream."""
    if not has_peers(observations):
        return
    loaders = [training_loaders(rank)[0] for rank in observations]
    first = [_first(loader) for loader in loaders]
    if None in first:
        raise NoSignal("the samples that the ranks take were not observed")
    same = [
        rank.rank for rank, drawn in zip(observations, first, strict=True) if first.count(drawn) > 1
    ]
    if not same:
        return
    is_stream = loaders[0].is_iterable
    yield Finding(
        kind="danger",
        what=f"ranks {', '.join(map(str, same))} take the same samples in the same order: "
        "they compute the same gradient, at the price of one rank's work each",
        do="in __iter__ take each world_size-th sample, from the rank on; with workers, each "
        "(world_size * num_workers)-th"
        if is_stream
        else "DataLoader(..., sampler=DistributedSampler(dataset)), and call its set_epoch in "
        "each epoch",
        where=at(loaders[0].dataset_site or loaders[0].site if is_stream else made(loaders[0])),
        parity="changes learning",
    )


def _first(loader: Loader) -> int | None:
    if loader.is_iterable:
        batches = loader.worker_batches
        # If the batches of one rank are all equal, equal batches of ranks show nothing.
        return batches[0] if len(set(batches)) > 1 else None
    return loader.hashes[0] if loader.hashes else None
