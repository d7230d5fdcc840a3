"""Check for a wrong order of stages in an input pipeline."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, training_loaders
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation


@check()
def look(observation: Observation) -> Findings:
    """Report pipelines that shuffle whole batches, or whose workers compute samples they drop."""
    for loader in training_loaders(observation):
        if not loader.is_iterable:
            continue  # the sampler of such a loader draws the order
        if loader.stages is None:
            raise NoSignal("the stages after the loader's dataset were not observed")
        if _shuffles_batches(loader.stages):
            yield _shuffled_late(loader)
        if _maps_before_sharding(loader):
            yield _shared_out_late(loader)


def _shuffles_batches(stages: list[str]) -> bool:
    are_batched = False
    late = False
    for stage in stages:
        if stage == "Batcher":
            are_batched = True
        elif stage == "UnBatcher":
            are_batched = False
        elif stage == "Shuffler" and not are_batched:
            return False
        elif stage == "Shuffler":
            late = True
    return late


def _maps_before_sharding(loader: Loader) -> bool:
    stages = loader.stages or []
    if (loader.num_workers or 0) < 2 or "ShardingFilter" not in stages:
        return False
    return "Mapper" in stages[: stages.index("ShardingFilter")]


def _shuffled_late(loader: Loader) -> Finding:
    return Finding(
        kind="danger",
        what="batches are shuffled, not samples: each batch has the same neighbors from the "
        "source in every epoch",
        do="shuffle() before batch()",
        where=at(loader.site),
        parity="changes learning",
    )


def _shared_out_late(loader: Loader) -> Finding:
    return Finding(
        kind="slow",
        what=f"each of {loader.num_workers} workers maps all samples, and drops those of the "
        "others afterwards",
        do="sharding_filter() before map()",
        where=at(loader.site),
        parity="bit-identical",
    )
