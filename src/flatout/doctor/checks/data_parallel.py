"""Check for nn.DataParallel: one process drives all GPUs and copies the model in each step."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, calls, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Report models that are wrapped in DataParallel."""
    made = [call.site for call in calls(observation, "data_parallel")]
    for model in models(observation):
        if model.wrapper == "DataParallel":
            yield Finding(
                kind="slow",
                what="nn.DataParallel copies the model to each GPU in each step and gathers all "
                "outputs on the first, from one Python process",
                do="DistributedDataParallel with a process for each GPU, at the same global batch",
                where=at(made[0] if made else model.site),
                parity="rounding",
            )
