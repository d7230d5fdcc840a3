"""Check for ranks that sum their gradients, but began with different weights."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import NoSignal, rank_check
from flatout.doctor.checks.signals import at, has_peers, models
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation


@rank_check()
def look(observations: Sequence[Observation]) -> list[Finding]:
    """Report ranks whose first steps had equal gradients and unequal weights.

    Ranks with different gradients are no replicas: several jobs, or ranks that average weights.
    """
    if not has_peers(observations):
        return []
    alike = list(zip(*[models(rank) for rank in observations], strict=False))
    if all(model.first_weights is None for of_ranks in alike for model in of_ranks):
        raise NoSignal("the first weights and gradients of the ranks were not observed")
    return [_finding(of_ranks) for of_ranks in alike if _differ(of_ranks)]


def _differ(of_ranks: Sequence[Model]) -> bool:
    by_gradients: dict[int, set[int]] = {}
    for model in of_ranks:
        if model.first_gradients is not None and model.first_weights is not None:
            by_gradients.setdefault(model.first_gradients, set()).add(model.first_weights)
    return any(len(weights) > 1 for weights in by_gradients.values())


def _finding(of_ranks: Sequence[Model]) -> Finding:
    weights = {model.first_weights for model in of_ranks}
    return Finding(
        kind="danger",
        what=f"{len(of_ranks)} ranks share their gradients but began with {len(weights)} different "
        "sets of weights, and keep them apart: no rank's model is the one that was trained",
        do="DistributedDataParallel, which copies rank 0's weights to all; or "
        "torch.distributed.broadcast of each parameter and buffer before the first step",
        where=at(of_ranks[0].site),
        parity="changes learning",
    )
