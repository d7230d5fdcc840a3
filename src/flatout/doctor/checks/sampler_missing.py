"""All ranks train on the same samples."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import Findings, NoSignal, rank_check
from flatout.doctor.checks.signals import at, has_peers, training_loaders
from flatout.doctor.edits import loops
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@rank_check(edit=loops.share_samples)
def look(observations: Sequence[Observation]) -> Findings:
    """Whether the indices of the first batches are equal on two ranks."""
    if not has_peers(observations):
        return
    loaders = [training_loaders(rank)[0] for rank in observations]
    first = [loader.hashes[0] if loader.hashes else None for loader in loaders]
    if None in first:
        raise NoSignal("which samples the ranks take was out of sight")
    same = [
        rank.rank for rank, drawn in zip(observations, first, strict=True) if first.count(drawn) > 1
    ]
    if not same:
        return
    yield Finding(
        kind="danger",
        what=f"ranks {', '.join(map(str, same))} take the same samples in the same order: "
        "they compute the same gradient, at the price of one rank's work each",
        do="DataLoader(..., sampler=DistributedSampler(dataset)), and call its set_epoch in "
        "each epoch",
        where=at(loaders[0].site),
        parity="changes learning",
    )
