"""`flatout doctor SCRIPT`: observes a script, and with consent tries cures on it, in trials."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from flatout.console import say_as_is
from flatout.devices import inventory
from flatout.doctor import (
    Cure,
    FirstLook,
    Prescription,
    Verdict,
    Verified,
    containment,
    why_no_trial,
    widened,
)
from flatout.doctor.first_look import first_look
from flatout.doctor.judge import judge
from flatout.doctor.prove import prove
from flatout.doctor.verify import verify
from flatout.errors import FlatoutError
from flatout.masked import masked
from flatout.processes import asked_to_end
from flatout.recipe import Parity
from flatout.report import changes, recipe_file
from flatout.report.baseline import Compared
from flatout.report.consent import agreed, has_terminal, provable, terms
from flatout.report.ended import ending_lines
from flatout.report.files import Files
from flatout.report.first_look import FirstLookReport, what_next
from flatout.report.proven import ProvenReport
from flatout.terminal import Console

FAILED, DANGER = 1, 3
"""Exit codes; also used are 0 if nothing dangerous was found, and 2 for wrong usage."""


@dataclass(frozen=True)
class Asked:
    """Options of the user.

    Attributes:
        recipe: file to which proven settings will be written.
        seconds, steps: maximum seconds and number of steps that the first look observes.
        proves: True to run trials, False to run none, None to ask the user.
        seeds: number of seeds of whole runs with and without the prescribed cures; 0 for none.
        target: loss for which whole runs report the time until they reach it; None for the lowest
            loss that both runs of a seed reach.
        files: other files to write or compare with.
        fix: worst parity of changes that are written into the code; None writes none.
    """

    what: list[str]
    recipe: Path
    seconds: float = 20.0
    steps: int | None = None
    verbose: bool = False
    in_place: bool = False
    proves: bool | None = None
    budget_s: float = 120.0
    allow: Parity = Parity.TOLERANT
    searches: bool = False
    seeds: int = 0
    target: float | None = None
    as_json: bool = False
    files: Files = field(default_factory=Files)
    diff: bool = False
    fix: Parity | None = None


@dataclass(frozen=True)
class _Treated:
    """Results of trials and whole runs, and the signal that ended them early."""

    prescription: Prescription | None = None
    verified: Verified | None = None
    met: int | None = None


def diagnose(asked: Asked) -> int:
    """Observe a script, prove its cures if agreed, and report; return the exit code.

    Raises:
        FlatoutError: torchrun's command line is invalid, or a file cannot be written.
    """
    if sys.stderr.isatty():
        where = "" if asked.in_place else " in a scratch copy"
        how_long = f"{asked.seconds:g} s from its first step; Ctrl-C ends it"
        say_as_is(f"watching {shlex.join(asked.what)}{where} for {how_long}")
    look = first_look(
        asked.what,
        seconds=asked.seconds,
        steps=asked.steps,
        verbose=asked.verbose,
        in_place=asked.in_place,
    )
    machine = inventory()
    verdict = judge(look.observations, machine) if look.observations else None
    console = _console(asked)
    runs = not look.failed and look.interrupted_by is None
    to_prove = None if verdict is None or not runs else _to_prove(asked, verdict)
    cures = provable(to_prove, asked.allow) if to_prove is not None else []
    can_ask = asked.proves is None and not asked.as_json and has_terminal()
    proves = bool(cures) and (asked.proves or can_ask)
    if verdict is not None:
        report = FirstLookReport(
            verdict,
            machine,
            look.seconds,
            asked.what,
            is_last=not proves,
            cures=len(cures),
            held=look.held,
            lacks=look.lacks,
            uncontained=look.uncontained,
            verbose=asked.verbose,
        )
        console.print(report, crop=False)
        if runs and asked.proves and why_no_trial(verdict):
            console.print(f"no trial can be made: {why_no_trial(verdict)}")
    for line in ending_lines(look, verdict):
        console.print(line, overflow="ignore", crop=False)  # a path must not be broken
    treated = _Treated(met=look.interrupted_by)
    if proves and to_prove is not None:
        treated = _treated(asked, look, to_prove, cures, console)
    compared = None
    if verdict is not None:
        if treated.met is None:
            _change_code(asked, verdict, treated.prescription, console, runs=runs)
        compared = asked.files.write(verdict, treated.prescription, treated.verified)
    for line in compared.describe() if compared else []:
        console.print(line)
    if asked.as_json:
        _print_json(asked, look, verdict, treated, compared)
    return _code(look, verdict, compared, treated.met)


def _treated(
    asked: Asked, look: FirstLook, verdict: Verdict, cures: list[Cure], console: Console
) -> _Treated:
    if not _agreed(asked, look, cures, console):
        console.print(*what_next(verdict.findings, asked.what, len(cures)), sep="\n", crop=False)
        return _Treated()
    prescription, met = _proven(asked, verdict, console)
    _report_trials(asked, look, verdict, prescription, console)
    if not asked.seeds or not prescription.prescribed or met is not None:
        return _Treated(prescription, met=met)
    verified, met = _verified(asked, prescription, console)
    return _Treated(prescription, verified, met)


def _to_prove(asked: Asked, verdict: Verdict) -> Verdict:
    return widened(verdict) if asked.searches and verdict.steps else verdict


def _console(asked: Asked) -> Console:
    goes_on = asked.diff and not sys.stdout.isatty()
    return Console(highlight=False, markup=False, quiet=asked.as_json, stderr=goes_on)


def _change_code(
    asked: Asked,
    verdict: Verdict,
    prescription: Prescription | None,
    console: Console,
    *,
    runs: bool,
) -> None:
    # Proven changes that no Recipe can express are shown in any case: asking would cost new trials.
    is_news = prescription is not None and bool(prescription.own_edits)
    shows = asked.diff or (is_news and asked.fix is None and not asked.as_json)
    if not shows and asked.fix is None:
        return
    result = changes.changes_of(verdict, prescription)
    console.print()
    if shows:
        changes.show(result, console)
    if asked.fix is not None and runs:
        changes.write(result, asked.fix, console)


def _agreed(asked: Asked, look: FirstLook, cures: list[Cure], console: Console) -> bool:
    console.print()
    if not look.held:  # the script ran in place: the containment of trials is not known yet
        with suppress(FlatoutError):  # no trial can begin, which is reported later
            contains, lacks = containment(asked.what)
            look = replace(look, held=contains, lacks=lacks)
    for line in terms(asked.what, look, cures, asked.budget_s, 2 * asked.seeds):
        console.print(line)
    return bool(asked.proves) or agreed(len(cures))


def _proven(asked: Asked, verdict: Verdict, console: Console) -> tuple[Prescription, int | None]:
    with _signals_end_trials() as met:
        try:
            given = prove(
                verdict,
                asked.what,
                budget_s=asked.budget_s,
                allow=asked.allow,
                told=lambda line: console.print(line, style="dim"),
            )
        except (FlatoutError, KeyboardInterrupt) as error:
            why = error.what if isinstance(error, FlatoutError) else "by a signal"
            given = Prescription(stopped=why)
    return given, met[0] if met else None


def _verified(
    asked: Asked, prescription: Prescription, console: Console
) -> tuple[Verified, int | None]:
    console.print()
    with _signals_end_trials() as met:
        verified = verify(
            asked.what,
            prescription,
            seeds=asked.seeds,
            target=asked.target,
            told=lambda line: console.print(line, style="dim"),
        )
    for line in verified.words():
        console.print(line)
    return verified, met[0] if met else None


@contextmanager
def _signals_end_trials() -> Iterator[list[int]]:
    met: list[int] = []

    def meet(number: int, _: FrameType | None) -> None:
        met.append(number)
        if len(met) == 1:
            raise KeyboardInterrupt

    with asked_to_end(meet):
        yield met


def _report_trials(
    asked: Asked, look: FirstLook, verdict: Verdict, given: Prescription, console: Console
) -> None:
    is_written = recipe_file.write(asked.recipe, given, asked.what)
    seconds = look.seconds + given.seconds
    file = asked.recipe if is_written else None
    report = ProvenReport(given, verdict, seconds, asked.what, file, asked.budget_s)
    console.print(report, crop=False)


def _code(
    look: FirstLook, verdict: Verdict | None, compared: Compared | None, met: int | None
) -> int:
    if met is not None:
        return 128 + met
    if look.failed:
        return FAILED
    if compared is not None:
        return compared.exit_code
    return DANGER if verdict and verdict.dangers else 0


def _print_json(
    asked: Asked,
    look: FirstLook,
    verdict: Verdict | None,
    treated: _Treated,
    compared: Compared | None,
) -> None:
    reason = "failed" if look.failed else "no steps"
    nothing = {"command": masked(asked.what), "ended": reason, "findings": []}
    answer = {
        "exit_code": look.exit_code,
        "interrupted_by": look.interrupted_by,
        "output": look.output,
        "seconds": round(look.seconds, 1),
        "held": look.held,
        "lacks": look.lacks,
        "refused": look.refused,
        "prescription": treated.prescription.as_dict() if treated.prescription else None,
        "verified": treated.verified.as_dict() if treated.verified else None,
        "compared": compared.as_dict() if compared else None,
    }
    print(json.dumps((verdict.as_dict() if verdict else nothing) | answer, indent=2))
