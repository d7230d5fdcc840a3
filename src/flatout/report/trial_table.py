"""Trials in the form that a page shows, made from a Prescription as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ORDER = ("prescribed", "left alone", "needs your OK", "not tried")


def trials_of(prescription: Mapping[str, Any]) -> dict[str, Any]:
    proofs, together = prescription["proofs"], prescription.get("together")
    trials = list(_trials(proofs, together))
    whole = [trial for trial in trials if trial["group"] == "together"] or [
        trial for trial in trials if trial["group"] == "prescribed"
    ]
    kept = ("floor", "before_s", "after_s", "run_steps", "stopped", "refused")
    return {
        "trials": trials,
        "step_ratio": whole[0]["ratio"] if len(whole) == 1 else None,
        **{name: prescription.get(name) for name in kept},
    }


def with_proofs(
    findings: Sequence[Mapping[str, Any]], prescription: Mapping[str, Any]
) -> list[dict[str, Any]]:
    ratios = {
        name: (item["trial"]["low"], item["trial"]["ratio"], item["trial"]["high"])
        for item in prescription["proofs"]
        if item.get("trial")
        for name in item["names"]
    }
    return [
        {**finding, "proven": ratios.get(finding["name"], finding.get("proven"))}
        for finding in findings
    ]


def _trials(
    proofs: list[Mapping[str, Any]], together: Mapping[str, Any] | None
) -> Iterator[dict[str, Any]]:
    of_group = {name: [proof for proof in proofs if proof["outcome"] == name] for name in _ORDER}
    for group, some in of_group.items():
        yield from (_trial(item, group) for item in some)
        if group == "prescribed" and together is not None and len(some) > 1:
            yield {**_trial(together, "together"), "name": f"all {len(some)} together"}


def _trial(proof: Mapping[str, Any], group: str) -> dict[str, Any]:
    result = proof.get("trial")
    samples = {True: "same samples", False: "other samples", None: ""}[proof.get("same_batches")]
    reason = proof.get("reason") or ""
    # The heading contains the words prescribed and not tried; the ratio shows the rest.
    verdict = {"left alone": "left alone", "needs your OK": "needs your OK"}.get(group, "")
    return {
        "name": proof["words"],
        "group": group,
        "ratio": [result["low"], result["ratio"], result["high"]] if result else None,
        "floor": result["floor"] if result else None,
        "parity": proof.get("parity") or "",
        "loss": ", ".join(part for part in (proof.get("loss"), samples) if part) or None,
        "verdict": ": ".join(part for part in (verdict, reason) if part) or None,
    }
