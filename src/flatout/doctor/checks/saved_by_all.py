"""Check for several ranks that write the same checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.doctor.checks.check import NoSignal, rank_check
from flatout.doctor.checks.signals import has_peers
from flatout.doctor.finding import Finding, Kind
from flatout.observe import Observation


@rank_check()
def look(observations: Sequence[Observation]) -> list[Finding]:
    """Report ranks that saved to one file in the same step, or equal tensors to several files.

    Shards differ in their files and in their contents.
    """
    if not has_peers(observations):
        return []
    files = {
        rank.rank: [saved for saved in rank.saved if saved.get("path") and saved.get("keys")]
        for rank in observations
    }
    if not any(files.values()):
        raise NoSignal("no rank saved a model in the steps that were observed")
    ranks, path = _shared(files, "path")
    if ranks:
        what = (
            f"ranks {_listed(ranks)} write {path} in the same step: a reader may find the "
            "parts of two files in it"
        )
        return [_finding(observations, ranks, "danger", what)]
    ranks, path = _shared(files, "contents")
    if ranks:
        what = (
            f"ranks {_listed(ranks)} each write a file with the same tensors, such as {path}: one "
            "of them would do"
        )
        return [_finding(observations, ranks, "note", what)]
    return []


def _shared(files: dict[int, list[dict[str, Any]]], key: str) -> tuple[list[int], str]:
    by_value: dict[tuple[Any, Any], dict[int, str]] = {}
    for rank, saves in files.items():
        for saved in saves:
            if saved.get(key) is not None:
                name = str(saved["path"]).rpartition("/")[2]
                by_value.setdefault((saved["step"], saved[key]), {})[rank] = name
    most = max(by_value.values(), key=len, default={})
    return (sorted(most), max(most.values())) if len(most) > 1 else ([], "")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _finding(
    observations: Sequence[Observation], ranks: Sequence[int], kind: Kind, what: str
) -> Finding:
    last = next(rank for rank in observations if rank.rank == ranks[-1])
    saves = [call.site for call in last.calls if call.kind == "save"]
    return Finding(
        kind=kind,
        what=what,
        do="if dist.get_rank() == 0: around the save alone; what all ranks take part in, such as "
        "gathering shards into a state dict, stays outside of it",
        where=str(saves[0]) if saves else "",
        parity="bit-identical",
    )
