"""Check for recurrent cells called in a Python loop, where a layer could run the whole sequence."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, kind_of, lane, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report cells whose inputs are parts of one tensor, and whose states pass on unchanged."""
    models(observation)
    for cell in observation.cells:
        forward = lane(observation, "forward")
        cost = min(1.0, cell.ms / max(forward, 1e-9)) * lane(observation, "forward", "backward")
        layer = f"nn.{cell.kind.removesuffix('Cell')}"
        yield Finding(
            kind=kind_of(observation, cost),
            what=f"a {cell.kind} is called {cell.length} times in a row, for each part of a tensor "
            "that is there before the loop",
            do=f"{layer}(..., batch_first=True) over the whole sequence; it has the same weights "
            "under the names weight_ih_l0, weight_hh_l0, bias_ih_l0 and bias_hh_l0",
            where=at(cell.site),
            cost_ms=cost,
            parity="rounding",
        )
