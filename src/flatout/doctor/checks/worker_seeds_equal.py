"""Loader workers draw the same random numbers."""

from __future__ import annotations

from flatout.doctor.checks.check import Check, NoSignal
from flatout.doctor.checks.signals import at, training_loaders
from flatout.doctor.finding import Finding
from flatout.observe import Observation


def look(seen: Observation) -> list[Finding]:
    """Whether two workers of a loader began in the same random state."""
    found = []
    for loader in training_loaders(seen):
        if (loader.num_workers or 0) < 2:
            continue
        states = loader.worker_hashes
        if states is None or len(states) < 2:
            raise NoSignal("the random state of the workers was not seen")
        if len(set(states)) == len(states):
            continue
        found.append(
            Finding(
                name="worker_seeds_equal",
                kind="danger",
                what=f"{len(states)} loader workers began with {len(set(states))} random "
                f"state{'s' if len(set(states)) > 1 else ''}: different samples get the same "
                "augmentation",
                do="seed from torch.initial_seed() in worker_init_fn; it differs in each worker",
                number=41,
                where=at(loader.dataset_site or loader.site),
                parity="changes learning",
            )
        )
    return found


CHECK = Check("worker_seeds_equal", (41,), look)
