"""Check for repeated compilation by torch.compile, caused by batches of many shapes."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, is_worth, models, ms, step_ms
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation

_MANY = 3
"""Minimum number of graphs made after the first steps; also the minimum number of input shapes.

A second shape normally causes one more graph, which then handles all shapes.
"""


@check()
def look(observation: Observation) -> Findings:
    """Report models with varying inputs that still cause new graphs after the first steps."""
    step_ms(observation)
    compiles = [item for item in observation.compiles if item[1]]
    if len(compiles) < 2:
        return
    (first, graphs, seconds), (last, all_graphs, all_seconds) = compiles[0], compiles[-1]
    more = all_graphs - graphs
    if more < _MANY:
        return
    trained = models(observation)
    if not any(model.inputs for model in trained):
        raise NoSignal("the input shapes of compiled code were not observed")
    # A model within a compiled function is not marked as compiled itself.
    compiled = [model for model in trained if model.is_compiled] or trained
    varied: Model = max(compiled, key=lambda model: len(model.inputs))
    if len(varied.inputs) < _MANY:
        return
    cost = 1e3 * (all_seconds - seconds) / (last - first)
    yield Finding(
        kind="slow" if is_worth(observation, cost) else "note",
        what=f"torch.compile made {more} more graphs after step {first}, {ms(cost)} per step, "
        f"for inputs of {len(varied.inputs)} shapes; after a few (recompile_limit) it gives "
        "up, and runs what is new uncompiled",
        do="pad or crop to a few sizes, or group samples of like sizes; or "
        "torch.compile(model, dynamic=True)",
        where=at(varied.site),
        cost_ms=cost,
        is_estimate=True,  # parts that run uncompiled are slower, too
        parity="rounding",
    )
