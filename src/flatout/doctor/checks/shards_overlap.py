"""Check for ranks that divide an epoch, but take some of the same samples."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import Findings, NoSignal, rank_check
from flatout.doctor.checks.signals import at, has_peers, made, training_loaders
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation

_FEWEST = 16
"""Minimum number of samples of a rank that have to be observed."""


@rank_check()
def look(observations: Sequence[Observation]) -> Findings:
    """Report samples at the start of an epoch that several ranks take."""
    if not has_peers(observations):
        return
    loaders = [training_loaders(rank)[0] for rank in observations]
    taken = [loader.taken for loader in loaders]
    if any(item is None or len(item) < _FEWEST for item in taken):
        raise NoSignal("the samples that the ranks take were not observed")
    sets = [set(item) for item in taken if item is not None]
    if any(len(own) < len(item or ()) for own, item in zip(sets, taken, strict=True)):
        return  # one rank takes some samples several times, as when rare samples are oversampled
    if all(own == sets[0] for own in sets) or _begin_alike(loaders):
        return  # sampler_missing reports this case
    numbers = [number for own in sets for number in own]
    shared = len(numbers) - len(set(numbers))
    if not shared:
        return
    yield Finding(
        kind="danger",
        what=f"of the first {len(numbers):,} samples that {len(sets)} ranks take in an epoch, "
        f"{shared:,} are taken by several: an epoch is not shared out among them. Each rank draws "
        "an order of its own, as with a seed that holds the rank",
        do="draw one order with the same seed in all ranks, and take each world_size-th of it "
        "from the rank on; or DistributedSampler",
        where=at(made(loaders[0])),
        parity="changes learning",
    )


def _begin_alike(loaders: Sequence[Loader]) -> bool:
    first = [loader.hashes[0] if loader.hashes else None for loader in loaders]
    return None not in first and len(set(first)) < len(first)
