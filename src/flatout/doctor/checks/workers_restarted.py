"""Check for loader workers that are restarted in each epoch."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import (
    at,
    is_worth,
    made,
    ms,
    parity_of_workers,
    training_loaders,
)
from flatout.doctor.edits import arguments
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation

_LATE = 3.0
"""Ratio to the usual wait for a batch from which on the first batch of an epoch is late."""

_STARTING_MS = 20.0
"""Shortest start of a worker in milliseconds: a shorter wait is no restart."""


@check(edit=arguments.stay)
def look(observation: Observation) -> Findings:
    """Report late first batches of later epochs, if workers do not persist."""
    for loader in training_loaders(observation):
        if not loader.num_workers or loader.persistent_workers is not False:
            continue
        if len(loader.first_ms) < 2 or loader.wait_ms is None:
            raise NoSignal("fewer than two epochs were observed")
        # The start in the first epoch cannot be avoided.
        late = [first - loader.wait_ms for first in loader.first_ms[1:]]
        cost = max(0.0, sum(late)) / max(1, observation.steps)
        slow = sorted(loader.first_ms[1:])[len(late) // 2]
        if slow >= max(_STARTING_MS, _LATE * loader.wait_ms) and is_worth(observation, cost):
            yield _finding(loader, slow, cost)


def _finding(loader: Loader, slow: float, cost: float) -> Finding:
    return Finding(
        kind="slow",
        what=f"{loader.num_workers} workers start again in each epoch: its first batch takes "
        f"{ms(slow)}, the others {ms(loader.wait_ms or 0.0)}",
        do="DataLoader(..., persistent_workers=True); random augmentation is redrawn",
        where=at(made(loader)),
        cost_ms=cost,
        is_estimate=True,  # the end of the old workers was not timed
        parity=parity_of_workers(loader),
        recipe={"script.persistent_workers": "on"},
    )
