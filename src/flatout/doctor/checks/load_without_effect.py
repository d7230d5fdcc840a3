"""Check for loads of weights that change no weight."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, few, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation, StateLoad


@check()
def look(observation: Observation) -> Findings:
    """Report state dicts without a matching name, and state dicts of the model's own tensors."""
    models(observation)
    for item in observation.state_loads:
        is_other = item.kind == "unmatched"
        yield Finding(
            kind="danger",
            what=_unmatched(item) if is_other else _own(item),
            do="use the model's names; load_state_dict returns the names that it has not found"
            if is_other
            else "copy.deepcopy(model.state_dict()), or torch.save at once",
            where=at(item.site if is_other else item.taken_at or item.site),
            parity="changes learning",
        )


def _unmatched(item: StateLoad) -> str:
    given = f"it has {few(item.given)}" if item.given else "it is empty"
    return (
        f"load_state_dict(strict=False) loads none of the {item.parameters} parameters of "
        f"{item.model}: {given}, the model has {few(item.wanted)}"
    )


def _own(item: StateLoad) -> str:
    line = f" (line {item.site.line})" if item.site else ""
    since = f"{item.steps:,} steps later" if item.steps else "after other weights were loaded"
    seen = f"loaded{line} {since}, it" if item.kind == "own" else "it"
    ends = f", and what is loaded later{line} are the last weights" if item.kind == "kept" else ""
    return (
        f"a state dict is no copy: {seen} holds the {item.parameters} parameters of {item.model} "
        f"themselves, which have moved since it was taken{ends}"
    )
