"""Check for batches that are picked from tensors by advanced indexing."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import calls, cost_ms, is_each_step, kind_of, ms
from flatout.doctor.edits import tensors
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(edit=tensors.index_select, hooks=True)
def look(observation: Observation) -> Findings:
    """Report lines that index a batch in most steps."""
    for call in calls(observation, "index"):
        cost = cost_ms(observation, call)
        if not is_each_step(observation, call):
            continue
        takes = "" if cost is None else f" in {ms(cost)}"
        # A mask, or indexing within a model, picks no batch. On a GPU this is unknown.
        is_batch = call.detail.get("rows") != []
        what = (
            f"advanced indexing picks each batch{takes}; index_select does the same on all cores"
            if is_batch
            else f"advanced indexing is called in each step{takes}; where it picks whole rows by "
            "their numbers, index_select does the same on all cores"
        )
        yield Finding(
            kind=kind_of(observation, cost),
            what=what,
            do="torch.index_select(data, 0, rows)"
            + (", or flatout.data.arrays(...) for the whole pipeline" if is_batch else ""),
            where=str(call.site),
            cost_ms=cost,
            parity="bit-identical",
        )
