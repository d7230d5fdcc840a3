"""Judges the observations of a script's ranks by all checks, before any trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.devices import Inventory, rows
from flatout.doctor.checks import CHECKS, RANK_CHECKS, NoSignal
from flatout.doctor.critical import Critical, critical
from flatout.doctor.finding import Finding, docs_page
from flatout.doctor.here import on_this_machine
from flatout.doctor.proposals import with_edits
from flatout.doctor.taken_out import bounded
from flatout.measure import available_bytes
from flatout.observe import Observation
from flatout.recipe import SETTINGS, Recipe

_KINDS = ("danger", "slow", "note")
_TUNED = {
    field
    for field, setting in SETTINGS.items()
    if setting.trial and not setting.of_input and Recipe().get(field) == "auto"
}
"""Fields that Flatout's own jobs tune by measurement unless the user has set them."""


@dataclass(frozen=True)
class Verdict:
    """Observations of a script, and the findings from them.

    Attributes:
        observations: one per rank, in order, with missing facts filled in from this machine.
        environment: facts by name: the machine, Python, torch.
        critical: the part of the steps that takes the most time; None if no step was observed.
        findings: dangers first, notes last; within a kind by the maximum time that a cure can save,
            then by name. No finding is proven yet.
        passed: names of checks that found nothing.
        unknown: names of checks that could not run, each with the reason.
    """

    observations: list[Observation]
    environment: dict[str, str]
    critical: Critical | None
    findings: list[Finding]
    passed: list[str]
    unknown: list[tuple[str, str]]

    @property
    def dangers(self) -> list[Finding]:
        """Findings that may make the job fail or learn something wrong."""
        return [finding for finding in self.findings if finding.kind == "danger"]

    @property
    def ended(self) -> str:
        """State in which the script ended: "failed" if any rank failed, else the first rank's."""
        states = [rank.ended for rank in self.observations]
        return "failed" if "failed" in states else (states or ["no steps"])[0]

    @property
    def error(self) -> str:
        """First error of the script itself, as Python prints it."""
        return next((rank.error for rank in self.observations if rank.error), "")

    @property
    def steps(self) -> int:
        """Largest number of observed optimizer steps of any rank."""
        return max((rank.steps for rank in self.observations), default=0)

    @property
    def added_us_per_step(self) -> float | None:
        """Largest overhead of observation of any rank, in microseconds per step."""
        known = [rank.added_us_per_step for rank in self.observations]
        return max((added for added in known if added is not None), default=None)

    @property
    def explained(self) -> float | None:
        """Smallest share, of any rank, of step time that is attributed to lines."""
        known = [rank.explained for rank in self.observations]
        return min((share for share in known if share is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "command": self.observations[0].command if self.observations else [],
            "environment": self.environment,
            "ended": self.ended,
            "error": self.error,
            "steps": self.steps,
            "added_us_per_step": self.added_us_per_step,
            "explained": self.explained,
            "critical": self.critical.as_dict() if self.critical else None,
            "findings": [
                finding.as_dict() | {"docs": docs_page(finding.name)} for finding in self.findings
            ],
            "passed": self.passed,
            "unknown": [list(item) for item in self.unknown],
            "observations": [rank.as_dict() for rank in self.observations],
        }


def judge(ranks: Sequence[Observation], machine: Inventory) -> Verdict:
    """Run every check over every rank."""
    free = available_bytes()
    observations = [on_this_machine(r, machine, free) for r in sorted(ranks, key=lambda r: r.rank)]
    findings: list[Finding] = []
    passed: list[str] = []
    unknown: list[tuple[str, str]] = []
    steps = max(rank.steps for rank in observations)
    for check in CHECKS:
        of_ranks = {
            rank.rank: _left_open(_looked(check.look, rank, steps), rank) for rank in observations
        }
        _sort(check.name, of_ranks, findings, passed, unknown)
    for across in RANK_CHECKS:
        _sort(
            across.name, {0: _looked(across.look, observations, steps)}, findings, passed, unknown
        )
    return Verdict(
        observations=observations,
        environment=_environment(observations[0], machine),
        critical=critical(observations),
        findings=[with_edits(item, observations) for item in sorted(findings, key=_place)],
        passed=passed,
        unknown=unknown,
    )


def _is_tuned(finding: Finding) -> bool:
    return bool(finding.recipe) and finding.recipe.keys() <= _TUNED


def _looked(look: Any, at: Any, steps: int) -> list[Finding] | str:
    try:
        findings: list[Finding] = look(at)
    except NoSignal as reason:
        return str(reason)
    return findings if findings or steps else "no step was observed"


def _left_open(findings: list[Finding] | str, rank: Observation) -> list[Finding] | str:
    if isinstance(findings, str):
        return findings
    if rank.framework == "flatout":
        findings = [item for item in findings if item.kind == "danger" or not _is_tuned(item)]
    return bounded(findings, rank)


def _sort(
    name: str,
    of_ranks: Mapping[int, list[Finding] | str],
    found: list[Finding],
    passed: list[str],
    unknown: list[tuple[str, str]],
) -> None:
    merged: dict[tuple[str, str], list[tuple[int, Finding]]] = {}
    for rank, findings in of_ranks.items():
        for finding in findings if isinstance(findings, list) else ():
            merged.setdefault((finding.kind, finding.where), []).append((rank, finding))
    found += [_merged(same, len(of_ranks)) for same in merged.values()]
    reasons = [reason for reason in of_ranks.values() if isinstance(reason, str)]
    if not merged and reasons:
        unknown.append((name, reasons[0]))
    elif not merged:
        passed.append(name)


def _merged(same: list[tuple[int, Finding]], ranks: int) -> Finding:
    dearest = max((finding for _, finding in same), key=lambda finding: finding.cost_ms or 0.0)
    places = sorted({rank for rank, _ in same})
    if len(places) == ranks:
        return dearest
    on = f"rank{'s' if len(places) > 1 else ''} {', '.join(map(str, places))}"
    return replace(dearest, what=f"{dearest.what} (only {on})")


def _place(finding: Finding) -> tuple[int, float, str]:
    # Findings without a known bound come after those with a bound.
    return _KINDS.index(finding.kind), -(finding.cost_ms or 0.0), finding.name


def _environment(observation: Observation, machine: Inventory) -> dict[str, str]:
    named = {name.strip() or "GPU order": words for name, words in rows(machine)}
    return named | {"device": observation.device} | observation.versions
