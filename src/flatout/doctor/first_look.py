"""Runs a script under observation for some seconds, and ends all its processes afterwards."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from flatout.doctor.subject import Contained, InPlace, Subject
from flatout.doctor.torchrun import under_torchrun
from flatout.doctor.trials.scratch import scratch, temporary_of
from flatout.errors import FlatoutError
from flatout.observe import Observation
from flatout.processes import asked_to_end

STARTING_S = 60.0
"""Seconds for a script's imports, data and model, in addition to the observation of its steps.
After that time the script is ended, even if it has taken no step."""

_INTERRUPTED_WITHIN_S = 5.0
"""Seconds that a script may take to end after an interrupt, in which it writes observations."""

_ABLATED = 0.4
"""Seconds in which lanes are taken out of steps, as a share of the seconds of observation."""

_LAPSE = 0.4
"""Seconds in which epochs end early, as a share of the seconds of observation.

Epochs end early only if the first epoch takes longer than the observation.
"""

_LAST_LINES = 15
_LAST_BYTES = 2**16
_LOOKS_EVERY_S = 0.05


@dataclass(frozen=True)
class FirstLook:
    """The result of an observed run.

    Attributes:
        observations: Observations of the ranks that wrote one; may be empty.
        exit_code: exit code of the script; below 0 for the signal that killed it; None if this
            process ended it.
        output: last lines of the script's output; empty if these lines were printed already.
        seconds: seconds that the run took.
        interrupted_by: number of the signal that interrupted this process, such as Ctrl-C's; None
            without a signal.
        held: how the script was contained: "overlay", "landlock" or "python"; "" in place.
        lacks: actions of the script that nothing contains here, as in trials.process.Process.
        uncontained: reason why the script could not be contained here; "" if it was contained, or
            ran in place on request.
        refused: attempts that were not allowed: {"kind", "what", "where"}.
        opened: mode and path of each opened path, in order; empty unless requested. The mode is
            "read", "written" or "listed".
    """

    observations: list[Observation]
    exit_code: int | None
    output: list[str]
    seconds: float
    interrupted_by: int | None = None
    held: str = ""
    lacks: list[str] = field(default_factory=list)
    uncontained: str = ""
    refused: list[dict[str, str]] = field(default_factory=list)
    opened: list[tuple[str, str]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """True if the script ended with its own error."""
        return bool(self.exit_code) or any(rank.ended == "failed" for rank in self.observations)


def first_look(
    what: Sequence[str],
    *,
    seconds: float,
    steps: int | None = None,
    verbose: bool = False,
    in_place: bool = False,
    starting_s: float = STARTING_S,
    opened: bool = False,
) -> FirstLook:
    """Run a script as `python` would, with its standard input closed, and observe it.

    The script is contained as in a trial: it writes to a scratch folder that is deleted afterwards,
    and cannot send anything over the network. Unless `steps` are given, lanes are then left out of
    some of its steps, which shows the maximum time that a cure of each lane can save. If the first
    epoch has not ended by then, epochs are made to end early, which shows the work that follows an
    epoch.

    Call this from the main thread, in which Python handles signals.
    """
    began = time.monotonic()
    met: list[int] = []  # numbers of signals that would end this process; `_watched` reads them
    with scratch() as folder, asked_to_end(lambda number, _: met.append(number)):
        out = temporary_of(folder) / "seen"
        out.mkdir()
        limits = ["--seconds", f"{seconds:g}", *(["--steps", str(steps)] if steps else [])]
        noted = out / "opened"
        limits += ["--opened", str(noted)] if opened else []
        observe = ["-m", "flatout.observe.start", str(out), *limits]
        ablate_s = 0.0 if steps else _ABLATED * seconds

        def command(*more: str) -> list[str]:
            start = [*observe, *more]
            return under_torchrun(what, start) or [sys.executable, *start, *what]

        further = ["--ablate", f"{ablate_s:g}", "--lapse", f"{_LAPSE * seconds:g}"]
        ablating = command(*further) if ablate_s else command()
        place = folder, out, in_place
        subject, uncontained = _begun(ablating, None if opened else command(), *place)
        try:
            until = began + seconds + ablate_s + starting_s
            until += _LAPSE * seconds if ablate_s else 0.0
            code = _watched(subject, until, met, verbose)
        finally:
            subject.end()
        return FirstLook(
            observations=[_ended(rank, code) for rank in _read(out)],
            exit_code=code,
            output=[] if verbose else _last_lines(subject.printed),
            seconds=time.monotonic() - began,
            interrupted_by=met[0] if met else None,
            held=subject.held,
            lacks=subject.lacks,
            uncontained=uncontained,
            refused=subject.refused(),
            opened=_opened(noted),
        )


def _begun(
    ablating: list[str], command: list[str] | None, folder: Path, path: Path, in_place: bool
) -> tuple[Subject, str]:
    reason = ""
    if not in_place:
        try:
            return Contained(ablating, folder / "look", temporary_of(folder) / "look", path), ""
        except FlatoutError as error:
            if command is None:
                raise
            reason = error.what
    assert command is not None
    return InPlace(command, folder / "output"), reason


def _watched(subject: Subject, until: float, met: list[int], verbose: bool) -> int | None:
    lines_shown = 0
    while not met and time.monotonic() < until:
        has_ended = subject.has_ended(_LOOKS_EVERY_S)
        if verbose:
            lines_shown += _show(subject.printed, lines_shown)
        if has_ended:
            return subject.code
    subject.interrupt()
    subject.has_ended(_INTERRUPTED_WITHIN_S)
    if verbose:
        _show(subject.printed, lines_shown)
    return None


def _show(printed: Path, lines_shown: int) -> int:
    with printed.open("rb") as file:
        file.seek(lines_shown)
        new = file.read()
    sys.stderr.write(new.decode("utf-8", errors="replace"))
    sys.stderr.flush()
    return len(new)


def _read(folder: Path) -> list[Observation]:
    paths = sorted(folder.glob("rank-*.json"))
    return [Observation.of(json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def _opened(path: Path) -> list[tuple[str, str]]:
    result = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            data = json.loads(line)
            result.append((data["how"], data["path"]))
    return result


def _ended(rank: Observation, code: int | None) -> Observation:
    if code is None and rank.ended in ("running", "failed"):
        return replace(rank, ended="stopped" if rank.steps else "no steps", error="")
    if rank.ended == "running":  # the process ended before it reported its end
        well = "done" if rank.steps else "no steps"
        return replace(rank, ended="failed" if code else well)
    return rank


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-_LAST_LINES:]
