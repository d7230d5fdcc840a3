"""Check for activations before max-pooling, which would cost a quarter after it."""

from __future__ import annotations

from collections.abc import Iterator

from flatout.doctor.checks.check import check
from flatout.doctor.checks.signals import at, is_worth, lane, models
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation


@check()
def look(observation: Observation) -> Iterator[Finding]:
    """Report models with an activation before max-pooling, which could be swapped."""
    swappable = [model for model in models(observation) if model.pool_after]
    for model in swappable:
        cost = lane(observation, "forward", "backward")
        if model.pool_ms is not None:
            cost = min(cost, model.pool_ms)
        if is_worth(observation, cost):
            yield _finding(model, cost)


def _finding(model: Model, cost: float) -> Finding:
    activation, pooling = model.pool_after[0]
    more = f" and {len(model.pool_after) - 1} more" if len(model.pool_after) > 1 else ""
    return Finding(
        kind="slow",
        what=f"activation {activation} runs before pooling {pooling}{more}: after pooling there "
        "are fewer values, and the result is the same",
        do="pool first, then activate",
        where=at(model.pool_site or model.site),
        cost_ms=cost,
        parity="bit-identical",
        recipe={"compute.rewrites": "on"},
    )
