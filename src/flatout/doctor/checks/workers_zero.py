"""Check for num_workers=0, with which the process that trains also loads."""

from __future__ import annotations

from flatout.doctor.checks.check import NoSignal, check
from flatout.doctor.checks.signals import (
    HUNGRY,
    at,
    is_gpu,
    lane,
    made,
    ms,
    share,
    training_loaders,
)
from flatout.doctor.edits import arguments
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation

_MANY = 4
"""Number of workers to suggest if CPUs suffice: each costs memory and a copy of the dataset."""


@check(edit=arguments.workers, lane="input")
def look(observation: Observation) -> list[Finding]:
    """Report loaders without workers that keep the step waiting."""
    alone = [loader for loader in training_loaders(observation) if loader.num_workers == 0]
    wait = lane(observation, "input")
    if observation.usable_cpus is None:
        raise NoSignal("the number of usable CPUs was not observed")
    # Workers use all cores instead of one. If the model computes on a GPU, all cores are free for
    # workers. If it computes on the same cores, dividing the work is all that can be saved.
    hidden = wait if is_gpu(observation) else wait * (1 - 1 / observation.usable_cpus)
    if share(observation, wait) < HUNGRY or share(observation, hidden) < HUNGRY / 2:
        return []
    return [_finding(observation, loader, wait, hidden) for loader in alone]


def _finding(observation: Observation, loader: Loader, wait: float, hidden: float) -> Finding:
    cpus = observation.usable_cpus or 1
    workers = max(1, min(_MANY, cpus - 1))
    # Each worker of an IterableDataset would return all of its samples.
    then = (
        "where each worker takes another part (torch.utils.data.get_worker_info)"
        if loader.is_iterable
        else "same samples in the same order, random augmentation is redrawn"
    )
    do = f"DataLoader(..., num_workers={workers}, persistent_workers=True); {then}"
    if loader.dataset.startswith("keras."):
        do = f"give the PyDataset workers={max(2, workers)} when it is made; with 1 there are none"
    return Finding(
        kind="slow",
        what=f"num_workers=0: each batch is loaded between two steps, {ms(wait)} per step, while "
        f"{cpus - 1} other CPU{'s' if cpus > 2 else ''} could do it during the steps",
        do=do,
        where=at(made(loader)),
        cost_ms=hidden,
        # Waiting for a disk, or loading on an idle core, costs no CPU time of the model.
        is_estimate=not is_gpu(observation),
        parity="redrawn",
        recipe={} if loader.is_iterable else {"input.workers": workers},
    )
