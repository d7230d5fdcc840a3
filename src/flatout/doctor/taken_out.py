"""Bounds on findings from ablations: a cure saves at most what removing its lane saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flatout.doctor.checks import CHECKS
from flatout.doctor.checks.signals import is_worth, ms
from flatout.doctor.finding import Finding
from flatout.observe import Ablation, Observation

_LANE_OF = {check.name: check.lane for check in CHECKS}

_WITHOUT = {
    ("input",): "waiting for input",
    ("sync",): "the sum of gradients",
    ("evaluation",): "evaluation",
    ("saving",): "saving",
}
"""Lanes that can be left out of steps, with a description of each."""


def bounded(findings: Sequence[Finding], observation: Observation) -> list[Finding]:
    """Return the findings of one rank with the measured bounds of their cost."""
    return [_bounded(finding, observation) for finding in findings]


def _bounded(finding: Finding, observation: Observation) -> Finding:
    measured = observation.ablations.get(_LANE_OF.get(finding.name, ""))
    if measured is None or finding.kind != "slow":
        return finding
    own = measured.returns_ms if finding.cost_ms is None else finding.cost_ms
    most = min(own, measured.returns_ms)
    is_told = is_worth(observation, most) or finding.takes
    return replace(finding, cost_ms=most, kind="slow" if is_told else "note")


def without(lanes: tuple[str, ...], observation: Observation) -> str:
    """Return words for the time of a step without its critical lanes; "" if not measured."""
    measured: Ablation | None = observation.ablations.get(lanes[0]) if len(lanes) == 1 else None
    if measured is None or lanes not in _WITHOUT or measured.low <= 1 + measured.floor:
        return ""
    return (
        f"; without {_WITHOUT[lanes]} a step would take {ms(measured.without_ms)} "
        f"instead of {ms(measured.step_ms)}"
    )
