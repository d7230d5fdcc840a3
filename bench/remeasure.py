"""Whether a prescription holds: whole runs of a script as it is against whole runs with its cures.

A run of n epochs takes start + n * epoch. Runs of two lengths give the time of an epoch alone, so
imports, reading data and saving at the end drop out, on both sides alike. What happens in every
epoch, evaluation and saving too, stays in: it is a part of what the user waits for, and what a
trial of steps leaves out there counts as its error. The two lengths of both sides run in the order
A B B A, so that a steady drift cancels.

The cures come from the doctor's JSON: those of a Recipe through `flatout run --recipe` (ranks:
torchrun with `flatout.cures.start`), changes of the script in a copy of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from flatout.measure.trial import run_trial
from flatout.recipe import Recipe, toml

FLATOUT = [sys.executable, "-c", "from flatout.cli.main import main; main()"]
# The shorter run, and the lengths that are tried until the longer one takes a second more.
SHORT, LENGTHS = 1, (3, 9, 27, 81)
LONGEST_S = 600.0


class NotMeasured(Exception):
    """A run failed; the text is why."""


@dataclass(frozen=True)
class Remeasured:
    """What whole runs said.

    Args:
        ratio: time of an epoch as it is over that with the cures; None where there is none.
        as_it_is, cured: seconds per epoch, at the median.
        epochs: of the longer runs.
        reason: why there is no ratio, or empty.
    """

    ratio: float | None = None
    as_it_is: float | None = None
    cured: float | None = None
    epochs: int | None = None
    reason: str = ""


def remeasure(
    script: Path, ranks: int, cures: Mapping[str, Any], *, seconds: float, pairs: int = 1
) -> Remeasured:
    """Run a script with and without all that was prescribed for it.

    Args:
        script: takes `--epochs`.
        ranks: that it runs on.
        cures: `recipe` and `edits`, as a Proof has them.
        seconds: that the longer run as it is takes beyond the shorter one, roughly.
        pairs: how often A B B A is run.
    """
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        try:
            a = _as_it_is(_copied(script, Path(folder, "as_it_is"), ()), ranks)
            b = _cured(_copied(script, Path(folder, "cured"), cures["edits"]), ranks, cures)
            long = _long(a, seconds)
            found = run_trial(
                lambda: _epoch_s(a, long), lambda: _epoch_s(b, long), max_pairs=pairs, min_pairs=1
            )
        except NotMeasured as error:
            return Remeasured(reason=str(error))
    return Remeasured(found.ratio, found.a_median, found.b_median, long)


Run = Callable[[int], float]  # of so many epochs, in seconds


def _as_it_is(script: Path, ranks: int) -> Run:
    return lambda epochs: _timed([*_python(ranks), str(script), "--epochs", str(epochs)], script)


def _cured(script: Path, ranks: int, cures: Mapping[str, Any]) -> Run:
    if not cures["recipe"]:
        return _as_it_is(script, ranks)
    recipe = script.with_name("flatout.toml")
    toml.dump(Recipe().replace(cures["recipe"]), recipe)
    if ranks > 1:
        start = [*_python(ranks), "-m", "flatout.cures.start"]
        variables = {"FLATOUT_RECIPE": str(recipe)}
    else:
        start, variables = [*FLATOUT, "run", "--recipe", str(recipe)], {}
    return lambda epochs: _timed([*start, str(script), "--epochs", str(epochs)], script, variables)


def _python(ranks: int) -> list[str]:
    several = ["torchrun", "--standalone", "--nproc-per-node", str(ranks)]
    return several if ranks > 1 else [sys.executable]


def _copied(script: Path, folder: Path, edits: Sequence[Mapping[str, Any]]) -> Path:
    """The script in a folder of its own, changed as prescribed."""
    folder.mkdir()
    copy = folder / script.name
    shutil.copy(script, copy)
    lines = copy.read_text().splitlines()
    for edit in sorted(edits, key=lambda one: -one["line"]):
        before = edit["before"].splitlines()
        first = edit["line"] - 1
        if Path(edit["file"]).name != script.name or lines[first:][: len(before)] != before:
            raise NotMeasured(f"the change of {edit['file']}:{edit['line']} does not fit")
        lines[first : first + len(before)] = edit["after"].splitlines()
    copy.write_text("\n".join(lines) + "\n")
    return copy


def _long(run: Run, seconds: float) -> int:
    """How many epochs take so much longer than the shorter run."""
    begun = run(SHORT)
    for epochs in LENGTHS:
        more = run(epochs) - begun
        if more >= min(1.0, seconds):
            break
    each = more / (epochs - SHORT)
    if each <= 0:
        raise NotMeasured(f"{epochs} epochs take no longer than {SHORT}")
    return max(SHORT + ceil(seconds / each), SHORT + 2)


def _epoch_s(run: Run, long: int) -> float:
    begun = run(SHORT)
    epoch = (run(long) - begun) / (long - SHORT)
    if epoch <= 0:
        raise NotMeasured(f"{long} epochs took no longer than {SHORT}")
    return epoch


def _timed(
    command: Sequence[str], script: Path, variables: Mapping[str, str] | None = None
) -> float:
    began = time.perf_counter()
    _, err, code = run_to_end(command, script.parent, LONGEST_S, variables)
    took = time.perf_counter() - began
    if code != 0:
        words = err.strip().splitlines() or ["it did not end"]
        raise NotMeasured(f"exit code {code}: {words[-1].strip()}")
    return took


def run_to_end(
    command: Sequence[str],
    folder: Path | str,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
) -> tuple[str, str, int | None]:
    """Run a command to its end: what it wrote, and its exit code; None if it was ended here."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return "", "", None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return out, err, process.returncode
