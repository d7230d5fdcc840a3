"""Trials in the form that a page shows, made from a Prescription as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_ORDER = ("prescribed", "left alone", "needs your OK", "not tried")


@dataclass(frozen=True)
class Trial:
    name: str
    group: str
    ratio: tuple[float, float, float] | None
    floor: float | None
    parity: str
    loss: str
    verdict: str

    @property
    def wins(self) -> bool:
        is_fine = self.group in ("", "prescribed", "together")
        return is_fine and self.ratio is not None and self.ratio[0] > 1 + (self.floor or 0.0)

    @property
    def loses(self) -> bool:
        return self.ratio is not None and self.ratio[2] < 1 - (self.floor or 0.0)

    @property
    def words(self) -> str:
        if self.ratio is None:
            return "not measured"
        low, mid, high = self.ratio
        return f"{mid:.2f}x [{low:.2f}, {high:.2f}]"


def trials_of(prescription: Mapping[str, Any]) -> list[Trial]:
    trials: list[Trial] = []
    floor, together = prescription.get("floor"), prescription.get("together")
    for group in _ORDER:
        proofs = [p for p in prescription.get("proofs") or () if p["outcome"] == group]
        trials += [_trial(proof, group, floor) for proof in proofs]
        if group == "prescribed" and together is not None and len(proofs) > 1:
            all_of_them = _trial(together, "together", floor)
            trials.append(replace(all_of_them, name=f"all {len(proofs)} together"))
    return trials


def step_ratio(trials: Sequence[Trial]) -> tuple[float, float, float] | None:
    """Return the interval of the ratio of all prescribed cures together, if it was measured."""
    whole = [trial for trial in trials if trial.group == "together"] or [
        trial for trial in trials if trial.group == "prescribed"
    ]
    return whole[0].ratio if len(whole) == 1 else None


def with_proofs(
    findings: Sequence[Mapping[str, Any]], prescription: Mapping[str, Any]
) -> list[dict[str, Any]]:
    ratios = {
        name: (item["trial"]["low"], item["trial"]["ratio"], item["trial"]["high"])
        for item in prescription.get("proofs") or ()
        if item.get("trial")
        for name in item["names"]
    }
    return [
        {**finding, "proven": ratios.get(finding["name"], finding.get("proven"))}
        for finding in findings
    ]


def _trial(proof: Mapping[str, Any], group: str, floor: float | None) -> Trial:
    result = proof.get("trial")
    samples = {True: "same samples", False: "other samples", None: ""}[proof.get("same_batches")]
    reason = proof.get("reason") or ""
    # The heading contains the words prescribed and not tried; the ratio shows the rest.
    verdict = {"left alone": "left alone", "needs your OK": "needs your OK"}.get(group, "")
    return Trial(
        name=proof["words"],
        group=group,
        ratio=(result["low"], result["ratio"], result["high"]) if result else None,
        floor=result["floor"] if result else floor,
        parity=proof.get("parity") or "",
        loss=", ".join(part for part in (proof.get("loss"), samples) if part),
        verdict=": ".join(part for part in (verdict, reason) if part),
    )
