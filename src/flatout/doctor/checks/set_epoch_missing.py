"""Check for samples that are shuffled into the same order in each epoch."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, training_loaders
from flatout.doctor.edits import loops
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation


@check(edit=loops.set_epoch)
def look(observation: Observation) -> Findings:
    """Report loaders that shuffle, but draw the same indices in all epochs."""
    for loader in training_loaders(observation):
        if not (loader.shuffles or loader.draws_order):
            continue
        if loader.hashes is None:
            raise NoSignal("the sampler was not observed")
        if len(loader.hashes) < 2:
            raise NoSignal("fewer than two epochs were observed")
        if len(set(loader.hashes)) == 1:
            yield _finding(loader)


def _finding(loader: Loader) -> Finding:
    cure = (
        "draw from seed + epoch, and call sampler.set_epoch(epoch) before each epoch"
        if loader.draws_order
        else "call sampler.set_epoch(epoch) before each epoch"
        if loader.is_distributed
        else "seed the generator once, before the first epoch, not in each"
    )
    return Finding(
        kind="danger",
        what=f"{len(loader.hashes or ())} epochs went through the samples in the same order, "
        f"though {'the sampler draws it' if loader.draws_order else 'they are shuffled'}",
        do=cure,
        where=at(loader.site),
        parity="changes learning",
    )
