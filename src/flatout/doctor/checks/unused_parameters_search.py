"""Check for find_unused_parameters=True although all parameters are used."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, calls, models
from flatout.doctor.edits import arguments
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(edit=arguments.no_search)
def look(observation: Observation) -> Findings:
    """Report that DDP searches the graph for unused parameters in each step, in vain."""
    made = [call.site for call in calls(observation, "ddp")]
    for model in models(observation):
        if not model.wrapper_options.get("find_unused_parameters"):
            continue
        if model.unused_parameters is None:
            raise NoSignal("the parameters that had gradients were not observed")
        if model.unused_parameters:
            continue
        yield Finding(
            kind="slow",
            what="find_unused_parameters=True walks the graph of each step, and found every "
            f"parameter used in all {observation.steps} steps",
            do="leave it away; if some steps do skip parameters, they fail at once and say so",
            where=at(made[0] if made else model.site),
            parity="bit-identical",
            recipe={"script.unused_parameters": "no_search"},
        )
