"""The announcement of `flatout doctor` before its trials, and the question whether to run them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flatout.doctor import Cure, FirstLook, Sends, Verdict, cures_of, find_sends, why_no_trial
from flatout.doctor.script_file import script_file
from flatout.recipe import Parity
from flatout.report.first_look import not_contained, short
from flatout.words import counted, duration

_MOST = 3
"""Maximum number of places that are named; further places are only counted."""

_LOGS = "logs to "


def has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def provable(verdict: Verdict, allow: Parity) -> list[Cure]:
    if why_no_trial(verdict):
        return []
    return [cure for cure in cures_of(verdict, allow) if cure.parity < Parity.LEARNING]


def terms(
    what: Sequence[str],
    look: FirstLook,
    cures: Sequence[Cure],
    budget_s: float,
    whole_runs: int = 0,
) -> list[str]:
    # The script itself runs twice, each cure once per value, and all cures together once.
    reruns = 2 + sum(1 + len(cure.others) for cure in cures) + 1
    lines = [
        f"{counted(len(cures), 'cure')} to prove: about {reruns} short reruns in a scratch copy, "
        f"{duration(budget_s)} at most" + _then(whole_runs)
    ]
    lacks = [*(["files"] if look.held == "python" else []), *look.lacks]
    if lacks:
        lines.append(f"{not_contained(lacks)}.")
    file = script_file(what)
    sends = find_sends(file) if file is not None else []
    loggers = dict.fromkeys(
        item.what[len(_LOGS) :] for item in sends if item.what.startswith(_LOGS)
    )
    if loggers:
        lines.append(f"Offline during trials: {', '.join(loggers)}.")
    others = [item for item in sends if not item.what.startswith(_LOGS)]
    met = {short(item["where"]) for item in look.refused if item["kind"] == "network"}
    reached = [item for item in others if short(f"{item.file}:{item.line}") in met]
    ahead = [item for item in others if item not in reached]
    if reached:
        lines.append(f"Refused, as it was in the first look: {_places(reached)}.")
    if ahead:
        lines.append(f"Not reached so far, and refused if it is: {_places(ahead)}.")
    return lines


def _then(whole_runs: int) -> str:
    if not whole_runs:
        return "."
    return f"; then {counted(whole_runs, 'whole run')}, where one is proven."


def _places(sends: Sequence[Sends]) -> str:
    named = [f"{item.what} ({short(f'{item.file}:{item.line}')})" for item in sends[:_MOST]]
    more = [f"{len(sends) - _MOST} more"] if len(sends) > _MOST else []
    return ", ".join([*named, *more])


def agreed(cures: int) -> bool:
    import typer

    try:
        return typer.confirm(f"Prove {'it' if cures == 1 else 'them'}?", default=True)
    except typer.Abort:
        typer.echo()
        return False
