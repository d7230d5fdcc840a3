"""torch.compile compiles again and again, since batches come in many shapes."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, is_worth, models, ms, step_ms
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation

_MANY = 3
"""Graphs made after the first steps, and shapes, from which on it is no settling: a second shape
makes one graph more, which then holds for all."""


@check()
def look(observation: Observation) -> Findings:
    """Whether graphs are still made after the first steps, by a model whose inputs vary."""
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
        raise NoSignal("the shapes of what is compiled were not seen")
    # A model within a compiled function does not say that it is compiled.
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
        is_estimate=True,  # what runs uncompiled is slower, too
        parity="rounding",
    )
