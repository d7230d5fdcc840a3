"""What `flatout doctor` says before its trials, and the question whether it may make them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flatout.doctor.finding import Finding
from flatout.doctor.first_look import FirstLook
from flatout.doctor.judge import Verdict
from flatout.doctor.script_file import script_file
from flatout.doctor.trials.network import Sends, find_sends
from flatout.recipe import Parity
from flatout.report.first_look import short
from flatout.say import counted

_MOST = 3
"""Places that are named; the others are counted."""

_LOGS = "logs to "


def has_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def provable(verdict: Verdict, allow: Parity) -> list[Finding]:
    """The findings whose cures trials can try: with a cure at hand, and no worse than allowed."""
    if not verdict.steps:
        return []
    return [
        finding
        for finding in verdict.findings
        if finding.kind == "slow"
        and (finding.recipe or finding.edits)
        and (not finding.parity or Parity.from_words(finding.parity) <= allow)
    ]


def terms(what: Sequence[str], look: FirstLook, cures: int, budget_s: float) -> list[str]:
    """What trials of this script would be, and what it cannot do in them, a line each.

    Args:
        what: the script and its arguments.
        look: the first look at it.
        cures: how many would be tried.
        budget_s: seconds for all of them.
    """
    reruns = 2 * (cures + (cures > 1))  # each with the script as it is, and all of them together
    lines = [
        f"{counted(cures, 'cure')} to prove: about {reruns} short reruns in a scratch copy, "
        f"{budget_s / 60:.2g} min at most."
    ]
    file = script_file(what)
    sends = find_sends(file) if file is not None else []
    loggers = dict.fromkeys(one.what[len(_LOGS) :] for one in sends if one.what.startswith(_LOGS))
    if loggers:
        lines.append(f"Offline meanwhile: {', '.join(loggers)}.")
    others = [one for one in sends if not one.what.startswith(_LOGS)]
    met = {short(one["where"]) for one in look.refused if one["kind"] == "network"}
    reached = [one for one in others if short(f"{one.file}:{one.line}") in met]
    ahead = [one for one in others if one not in reached]
    if reached:
        lines.append(f"Refused, as it was in the first look: {_places(reached)}.")
    if ahead:
        lines.append(f"Not reached so far, and refused if it is: {_places(ahead)}.")
    return lines


def _places(sends: Sequence[Sends]) -> str:
    named = [f"{one.what} ({short(f'{one.file}:{one.line}')})" for one in sends[:_MOST]]
    more = [f"{len(sends) - _MOST} more"] if len(sends) > _MOST else []
    return ", ".join([*named, *more])


def agreed(cures: int) -> bool:
    """Ask on the terminal; no answer at all is none."""
    import typer

    try:
        return typer.confirm(f"Prove {'it' if cures == 1 else 'them'}?", default=True)
    except typer.Abort:
        typer.echo()
        return False
