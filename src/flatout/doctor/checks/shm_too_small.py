"""Check for batches in transit from loader workers that do not fit into /dev/shm."""

from __future__ import annotations

from math import ceil

from flatout.doctor.checks.check import NoSignal, check
from flatout.doctor.checks.signals import at, made
from flatout.doctor.finding import Finding
from flatout.doctor.machine import SHM_DO, shm_words
from flatout.observe import Loader, Observation
from flatout.words import memory_words

_MIB = 2**20


@check()
def look(observation: Observation) -> list[Finding]:
    """Report loaders whose batches in transit may exceed the free space."""
    # Only worker processes of torch have a prefetch factor.
    sharing = [
        loader for loader in observation.loaders if loader.num_workers and loader.prefetch_factor
    ]
    if not sharing:
        return []
    if observation.shm_free_mb is None:
        raise NoSignal("the free space of /dev/shm was not observed")
    sized = [(loader, _on_its_way(loader)) for loader in sharing if loader.batch_bytes]
    if not sized:
        raise NoSignal("the size of the batches was not observed")
    free = observation.shm_free_mb * _MIB
    return [_finding(loader, needed, free) for loader, needed in sized if needed > free]


def _on_its_way(loader: Loader) -> int:
    batches = (loader.num_workers or 0) * (loader.prefetch_factor or 0) + 1
    if loader.length is not None and loader.batch_size:
        batches = min(batches, ceil(loader.length / loader.batch_size))
    return batches * (loader.batch_bytes or 0)


def _finding(loader: Loader, needed: int, free: float) -> Finding:
    return Finding(
        kind="danger",
        what=f"{shm_words(free)}, and {loader.num_workers} workers that prefetch "
        f"{loader.prefetch_factor} batches of {memory_words(loader.batch_bytes or 0)} each "
        f"need up to {memory_words(needed)}: they die with a bus error when it is full",
        do=f"{SHM_DO}; fewer workers, or a smaller prefetch_factor, need less",
        where=at(made(loader)),
        parity="bit-identical",
    )
