"""Check for ranks that hold different parts of the parameters, one of them much more."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from flatout.doctor.checks.check import Findings, NoSignal, rank_check
from flatout.doctor.checks.signals import at, has_peers
from flatout.doctor.finding import Finding
from flatout.observe import Observation
from flatout.words import memory_words

_UNEVEN = 1.25
"""Ratio of a rank's bytes to the mean from which on the rank has too many bytes."""

_MUCH = 8 * 2**20
"""Minimum bytes above the mean that are reported: Adam moves twelve times as many bytes."""


@rank_check()
def look(observations: Sequence[Observation]) -> Findings:
    """Report ranks whose optimizers step unequal numbers of bytes. Replicas step equal numbers."""
    if not has_peers(observations):
        return
    sizes = [_bytes(rank) for rank in observations]
    mean = fmean(sizes)
    if max(sizes) < max(_UNEVEN * mean, mean + _MUCH):
        return
    fullest = observations[sizes.index(max(sizes))]
    yield Finding(
        kind="note",
        what=f"rank {fullest.rank} steps {memory_words(max(sizes))} of parameters, the "
        f"ranks {memory_words(mean)} in the mean: the others wait while it updates them, "
        "and its memory is full first",
        do="share out by bytes: the largest parameter first, each to the rank that has least; "
        "split tables that are larger than a rank's part",
        where=at(fullest.optimizers[0].site),
        parity="rounding",
    )


def _bytes(rank: Observation) -> int:
    known = [optimizer.local_bytes for optimizer in rank.optimizers]
    if not known or None in known:
        raise NoSignal(f"the parameters of rank {rank.rank} were not observed")
    return sum(size or 0 for size in known)
