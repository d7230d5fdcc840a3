"""Check for early stopping or checkpointing by a metric in the wrong direction."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, in_mode, other_mode
from flatout.doctor.finding import Finding
from flatout.observe import Monitor, Observation

_KEEPS = {"min": "smallest", "max": "largest"}
_WAITS = {"min": "falls", "max": "rises"}


@check()
def look(observation: Observation) -> Findings:
    """Report callbacks and comparisons that treat a large loss or a small score as better."""
    if not observation.steps:
        raise NoSignal("no step was observed")
    for monitor in observation.monitors:
        better = other_mode(monitor)
        if monitor.acts == "lowers" or not better:
            continue
        yield Finding(
            kind="danger",
            what=_what(monitor),
            do=_do(monitor.kind, better),
            where=at(monitor.site),
            parity="changes learning",
        )


def _what(monitor: Monitor) -> str:
    which, metric = _KEEPS[monitor.mode], f"{monitor.metric}, a {monitor.metric_kind}"
    if monitor.kind == "if":
        return (
            f"weights are kept where {metric}, is the {which} so far: the weights of the worst "
            "epoch"
        )
    does = (
        f"keeps the weights with the {which} {monitor.metric_kind}"
        if monitor.acts == "keeps"
        else f"ends the training once the {monitor.metric_kind} no longer {_WAITS[monitor.mode]}"
    )
    return f"{monitor.kind} monitors {metric}, {in_mode(monitor)}: it {does}"


def _do(kind: str, better: str) -> str:
    if kind == "if":
        return "reverse the comparison"
    if kind.endswith("TrainingArguments"):
        return f"greater_is_better={better == 'max'}"
    return f'{kind}(..., mode="{better}")'
