"""Whether a prescription holds: whole runs of a script as it is against whole runs with its cures.

The scripts print a line that begins with "epoch" in each epoch. From one such line to the next is
an epoch with all that the user waits for: evaluation and saving, which a trial of steps may have
left out, count as its error. Imports, reading data and the first epoch, in which caches fill, lie
before the second line, saving at the end behind the last. So the start of a process, its least
steady part, is not in the figure. The runs are made in the order A B B A, several times, so that a
steady drift cancels, until the figure is precise enough to tell an error of 5% from noise.

The cures come from the doctor's JSON: those of a Recipe through `flatout run --recipe` (ranks:
torchrun with `flatout.cures.start`), changes of the script in a copy of it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from flatout.measure.trial import run_trial
from flatout.recipe import Recipe, toml
from restarts import end, start

FLATOUT = [sys.executable, "-c", "from flatout.cli.main import main; main()"]
# The lengths that are tried until epochs take a second, and the fewest that are measured. Of those
# that tell of themselves the first one is left out, and the second one begins what is measured.
LENGTHS, FEWEST, BEFORE = (4, 12, 36, 108), 2, 2
LONGEST_S, A_SECOND = 600.0, 1.0
# Quadruples of runs at least and at most, and how far apart the ends of their interval may lie.
LEAST, MOST, PRECISION = 3, 6, 0.04
EPOCH = re.compile(r"epoch \d", re.IGNORECASE)


class NotMeasured(Exception):
    """A run failed; the text is why."""


@dataclass(frozen=True)
class Remeasured:
    """What whole runs said.

    Args:
        ratio: time of an epoch as it is over that with the cures; None where there is none.
        as_it_is, cured: seconds per epoch, at the median.
        epochs: of the runs as it is; those with cures have more where these would take no second.
        low, high: between which the ratio lies, by several quadruples.
        reason: why there is no ratio, or empty.
    """

    ratio: float | None = None
    as_it_is: float | None = None
    cured: float | None = None
    epochs: int | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""


def remeasure(script: Path, ranks: int, cures: Mapping[str, Any], *, seconds: float) -> Remeasured:
    """Run a script with and without all that was prescribed for it.

    Args:
        script: takes `--epochs`.
        ranks: that it runs on.
        cures: `recipe` and `edits`, as a Proof has them.
        seconds: that the measured epochs of a run as it is take, roughly.
    """
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        try:
            a = as_it_is(script, Path(folder, "as_it_is"), ranks)
            b = cured(script, Path(folder, "cured"), cures, ranks)
            epochs = epochs_within(a, seconds)
            # A cure may leave so little of them that they can't be measured.
            more = max(epochs, epochs_within(b, min(A_SECOND, seconds)))
            found = run_trial(
                lambda: epoch_s(a(epochs)),
                lambda: epoch_s(b(more)),
                max_pairs=MOST,
                min_pairs=LEAST,
                precision=PRECISION,
            )
        except NotMeasured as error:
            return Remeasured(reason=str(error))
    return Remeasured(found.ratio, found.a_median, found.b_median, epochs, found.low, found.high)


Run = Callable[[int], list[float]]  # of so many epochs: when each told of itself, in seconds


def as_it_is(script: Path, folder: Path, ranks: int = 1) -> Run:
    """Runs a copy of the script, in a folder that is made for it."""
    return _run(_copied(script, folder, ()), ranks)


def _run(script: Path, ranks: int) -> Run:
    return lambda epochs: _timed([*_python(ranks), str(script), "--epochs", str(epochs)], script)


def cured(script: Path, folder: Path, cures: Mapping[str, Any], ranks: int = 1) -> Run:
    """Likewise, with cures: `recipe` and `edits`, as a Proof has them."""
    script = _copied(script, folder, cures["edits"])
    if not cures["recipe"]:
        return _run(script, ranks)
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
    """The script in its own folder, changed as prescribed."""
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


def epochs_within(run: Run, seconds: float) -> int:
    """How many epochs a run must have, so that those that are measured take so long."""
    for epochs in LENGTHS:
        each = epoch_s(run(epochs))
        if each * (epochs - BEFORE) >= min(A_SECOND, seconds):
            break
    return BEFORE + max(FEWEST, ceil(seconds / each))


def epoch_s(told: Sequence[float]) -> float:
    """Seconds from one epoch's line to the next; the first epoch is left out."""
    if len(told) < BEFORE + FEWEST:
        raise NotMeasured(f"of {len(told)} epochs that were told, too few to be measured")
    return (told[-1] - told[BEFORE - 1]) / (len(told) - BEFORE)


def _timed(
    command: Sequence[str], script: Path, variables: Mapping[str, str] | None = None
) -> list[float]:
    """Run a script to its end: when each line of an epoch came."""
    told: list[float] = []

    def hear(lines: Iterable[str]) -> None:
        told.extend(time.perf_counter() for line in lines if EPOCH.match(line))

    process = start(command, script.parent, {"PYTHONUNBUFFERED": "1", **(variables or {})})
    assert process.stdout is not None
    assert process.stderr is not None
    words: list[str] = []
    readers = [
        threading.Thread(target=hear, args=[process.stdout]),
        threading.Thread(target=words.extend, args=[process.stderr]),
    ]
    for reader in readers:
        reader.start()
    try:
        code = process.wait(LONGEST_S)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end(process)
    for reader in readers:
        reader.join()
    if code != 0:
        last = "".join(words).strip().splitlines() or ["it did not end"]
        raise NotMeasured(f"exit code {code}: {last[-1].strip()}")
    return told
