"""Samples are shuffled, but into the same order in each epoch."""

from __future__ import annotations

from flatout.doctor.checks.check import Check, NoSignal
from flatout.doctor.checks.signals import at, training_loaders
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation


def look(seen: Observation) -> list[Finding]:
    """Whether a loader that shuffles gives all epochs the same indices."""
    found = []
    for loader in training_loaders(seen):
        if not loader.shuffles:
            continue
        if loader.hashes is None:
            raise NoSignal("the sampler is out of sight")
        if len(loader.hashes) < 2:
            raise NoSignal("fewer than two epochs were seen")
        if len(set(loader.hashes)) == 1:
            found.append(_found(loader))
    return found


def _found(loader: Loader) -> Finding:
    cure = (
        "call sampler.set_epoch(epoch) before each epoch"
        if loader.is_distributed
        else "seed the generator once, before the first epoch, not in each"
    )
    return Finding(
        name="set_epoch_missing",
        kind="danger",
        what=f"{len(loader.hashes or ())} epochs went through the samples in the same order, "
        "though they are shuffled",
        do=cure,
        number=26,
        where=at(loader.site),
        parity="changes learning",
    )


CHECK = Check("set_epoch_missing", (26,), look)
