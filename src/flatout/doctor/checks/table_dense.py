"""Check for dense optimizers that update all rows of a table although a batch uses few rows."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, is_worth, lane, models, ms
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_TOUCHED = 0.1
"""Share of rows with a nonzero gradient below which sparse updates are cheaper.

A sparse update costs several times as much for each touched row.
"""

_STEPPED = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
"""Optimizers of torch.optim whose dense result is reached by updating touched rows alone."""


@check()
def look(observation: Observation) -> Findings:
    """Report embeddings whose gradients are nearly all zeros."""
    if not any("Embedding" in layer for model in models(observation) for layer in model.layers):
        return
    if all(optimizer.sparse_share is None for optimizer in observation.optimizers):
        raise NoSignal("the rows of the embeddings that have gradients were not observed")
    sparse = [
        optimizer
        for optimizer in observation.optimizers
        if optimizer.sparse_share is not None and optimizer.sparse_share < _TOUCHED
    ]
    if not sparse:
        return
    cost = lane(observation, "backward", "optimizer")
    if not is_worth(observation, cost):
        return
    for optimizer in sparse:
        package, _, name = optimizer.kind.rpartition(".")
        is_on_cpu = set(optimizer.devices) == {"cpu"}
        steps_rows = is_on_cpu and package.startswith("torch.optim") and name in _STEPPED
        yield Finding(
            kind="slow",
            what=f"a batch touches {optimizer.sparse_share:.1%} of the embeddings, and {name} "
            f"updates all of them; backward and optimizer take {ms(cost)}",
            do="step touched rows only, with the result of the dense optimizer"
            if steps_rows
            else "nn.Embedding(..., sparse=True) with SparseAdam or SGD: rows without gradients "
            "keep their values, but dense Adam's momentum changes them",
            where=at(optimizer.site),
            cost_ms=cost * (1 - (optimizer.sparse_share or 0.0)),
            parity="rounding" if steps_rows else "changes learning",
            recipe={"compute.touched_rows": "on"} if steps_rows else {},
        )
