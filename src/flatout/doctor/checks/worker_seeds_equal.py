"""Check for loader workers that draw the same random numbers."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, made, training_loaders
from flatout.doctor.edits import workers
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation


@check(edit=workers.seed_each)
def look(observation: Observation) -> Findings:
    """Report workers of a loader that began in the same random state."""
    for loader in training_loaders(observation):
        if (loader.num_workers or 0) < 2:
            continue
        states = loader.worker_hashes
        if states is None:
            raise NoSignal("the random state of the workers was not observed")
        if len(set(states)) < len(states):
            yield _finding(loader, states)


def _finding(loader: Loader, states: list[int]) -> Finding:
    is_own = loader.worker_draws not in ("", "torch", "random", "numpy")
    cure = (
        "give each worker's copy another seed in worker_init_fn: "
        "torch.utils.data.get_worker_info() has its dataset and its seed"
        if is_own
        else "seed from torch.initial_seed() in worker_init_fn; it differs in each worker"
    )
    generator = f" of {loader.worker_draws}" if loader.worker_draws else ""
    different = len(set(states))
    return Finding(
        kind="danger",
        what=f"{len(states)} loader workers drew from {different} random "
        f"state{'s' if different > 1 else ''}{generator}: different samples get the same "
        "augmentation",
        do=cure,
        where=at(made(loader) or loader.dataset_site),
        parity="changes learning",
    )
