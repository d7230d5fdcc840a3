"""Check for samples that a dataset caches as they are read, and that will not all fit in memory."""

from __future__ import annotations

import math
from statistics import correlation, linear_regression

from flatout.doctor.checks.check import NoSignal, check
from flatout.doctor.checks.signals import at, batches_per_step, training_loaders
from flatout.doctor.finding import Finding
from flatout.measure import grows_steadily
from flatout.observe import Loader, Observation

_POINTS = 5
"""Minimum number of memory measurements to fit a line."""

_STRAIGHT, _STRAIGHT_KEPT = 0.9, 0.7
"""Smallest correlation between memory and steps that counts as steady growth.

The limit is below 1, since heaps grow in stairs of 16 MB. _STRAIGHT: limit for most datasets;
_STRAIGHT_KEPT: limit for a dataset that was observed to keep an entry for each sample.
"""

_STAIRS_MB = 16.0
"""Largest jump of memory in MB that counts as steady growth; larger jumps come from image sizes.

Datasets that were observed to keep an entry for each sample have no such limit.
"""

_LEAST_MB = 32.0
"""Minimum growth of memory in megabytes that is not the allocator's own."""

_LIKE_A_SAMPLE = (0.7, 2.0)
"""Range for growth of memory per sample, relative to the size of a sample, if samples are kept.

Objects and containers increase this ratio, and samples that are read again decrease it.
"""

_KEPT = 0.7
"""Entries per sample from which on a dataset counts as keeping its samples.

Then memory may grow by any factor: small samples that stay leave holes between freed large tensors.
"""


@check()
def look(observation: Observation) -> list[Finding]:
    """Report that memory grows with each sample read, and would exceed the free memory."""
    loaders = [loader for loader in training_loaders(observation) if not loader.is_iterable]
    if not loaders:
        return []
    loader = max(loaders, key=lambda loader: loader.batches)
    steps, memory = _memory(observation, loader)
    if observation.available_mb is None:
        raise NoSignal("the free memory was not observed")
    slope, _ = linear_regression(steps, memory)
    grown = slope * (steps[-1] - steps[0])
    straight = _STRAIGHT_KEPT if _keeps(loader) else _STRAIGHT
    if grown < _LEAST_MB or correlation(steps, memory) < straight:
        return []
    if not _keeps(loader) and not grows_steadily(steps, memory, _STAIRS_MB**2 / 12):
        return []
    each = slope / max(1.0, (loader.batch_size or 1) * batches_per_step(observation))
    whole = _whole_mb(loader, each)
    if whole is None or whole <= observation.available_mb:
        return []
    return [_finding(loader, observation, each, whole)]


def _memory(observation: Observation, loader: Loader) -> tuple[list[int], list[float]]:
    steps, memory = (
        (observation.job_at, observation.job_mb)
        if loader.num_workers
        else (observation.memory_at, observation.own_mb)
    )
    first = len(memory) // 4
    if len(set(steps[first:])) < _POINTS:
        raise NoSignal("the job's memory was measured too few times to see it grow")
    return steps[first:], memory[first:]


def _whole_mb(loader: Loader, each: float) -> float | None:
    if loader.length is None or not loader.sample_bytes or not loader.batch_size:
        raise NoSignal("memory grows, but the size and number of the samples were not observed")
    least, most = _LIKE_A_SAMPLE
    if _keeps(loader):
        most = math.inf
    if not least <= each * 2**20 / loader.sample_bytes <= most:
        return None
    return loader.length * each * _copies(loader)


def _keeps(loader: Loader) -> bool:
    return (loader.kept_per_sample or 0.0) >= _KEPT


def _copies(loader: Loader) -> int:
    return max(1, loader.num_workers or 1) if loader.persistent_workers else 1


def _finding(loader: Loader, observation: Observation, each: float, whole: float) -> Finding:
    copies = _copies(loader)
    workers = f" in each of {copies} workers" if copies > 1 else ""
    swapped = (
        f"; {observation.swapped_mb:,.0f} MB lie in swap"
        if (observation.swapped_mb or 0) >= 1
        else ""
    )
    return Finding(
        kind="danger",
        what=f"memory grows by {each * 2**10:,.0f} KB with each sample read, as if it were kept: "
        f"all {loader.length:,}{workers} will take {whole / 2**10:,.1f} GB, "
        f"{(observation.available_mb or 0) / 2**10:,.1f} GB are free{swapped}",
        do="keep a part only, or write the samples once to a file and map it (numpy.load with "
        "mmap_mode='r'): then all workers share what fits",
        where=at(loader.dataset_site or loader.site),
        parity="bit-identical",
    )
