"""Numbers too small for full precision, with which a CPU computes many times slower."""

from __future__ import annotations

from flatout.doctor.checks.check import Check, NoSignal
from flatout.doctor.checks.signals import at, is_gpu, is_worth, lane, models, ms
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_MANY = 0.01
"""Share of a tensor's numbers: an operator takes a hundred times as long for each of them."""


def look(seen: Observation) -> list[Finding]:
    """Whether a tensor of a model or its optimiser has many, on a CPU that does not flush them."""
    if is_gpu(seen):
        return []
    trained = models(seen)
    if all(model.subnormal_share is None for model in trained):
        raise NoSignal("the numbers of the model were not looked at")
    cost = lane(seen, "forward", "backward", "optimiser")
    if not is_worth(seen, cost):
        return []
    return [
        Finding(
            name="denormals",
            kind="slow",
            what=f"up to {model.subnormal_share:.0%} of the numbers in a tensor of the model or "
            "its optimiser are subnormal (below 1.2e-38); forward, backward and optimiser take "
            f"{ms(cost)}",
            do="torch.set_flush_denormal(True) at the start, before anything is computed",
            number=35,
            where=at(model.site),
            cost_ms=cost,
            parity="rounding",
            recipe={"process.flush_denormals": "on"},
        )
        for model in trained
        if (model.subnormal_share or 0.0) >= _MANY
    ]


CHECK = Check("denormals", (35,), look)
