"""The output at the end of a bench: a table, a line for each key, and the same as JSON.

    python bench/trainer.py --json bench/results/trainer.json [--minutes 30] [--quick]

The JSON also holds the command, the date, the commit and the hardware. `docs/measurements.py` makes
pages of such files.

After Ctrl-C, SIGTERM or the time limit of `--minutes`, a bench shows the results up to that moment,
and a reason in place of each missing figure. Until the JSON is written, `FILE.part` holds a line
for each process. The exit code is 0, but 130 after Ctrl-C and 143 after SIGTERM. It is 1 if a part
has failed or, with `--check`, if a key is not met.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from math import inf
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from time import monotonic
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flatout.measure import Interval, fingerprint
from restarts import PROGRESS, Row, plain, ratio


@dataclass(frozen=True)
class Key:
    """A number that a bench is judged by.

    Args:
        name: as the JSON calls it.
        found: the number, with its interval where it has one; or the reason why there is none.
        at_most: the largest number that meets the key, or
        at_least: the smallest; neither for a number that is only shown.
        note: what else to say about it.
    """

    name: str
    found: Interval | float | str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def value(self) -> float | None:
        if isinstance(self.found, Interval):
            return self.found.mid
        return None if isinstance(self.found, str) else self.found

    @property
    def met(self) -> bool | None:
        """None where there is no bound; a number that was not measured meets none."""
        if self.at_most is None and self.at_least is None:
            return None
        if self.value is None:
            return False
        is_above = self.at_least is None or self.value >= self.at_least
        return is_above and (self.at_most is None or self.value <= self.at_most)

    @property
    def words(self) -> str:
        if isinstance(self.found, str):
            said = f"not measured ({self.found})"
        elif isinstance(self.found, Interval):
            said = interval_words(self.found)
        else:
            said = _number(self.found)
        parts = [f"{self.name} {said}"]
        if self.at_most is not None:
            parts.append(f"at most {self.at_most:g}")
        if self.at_least is not None:
            parts.append(f"at least {self.at_least:g}")
        if self.met is not None:
            parts.append("met" if self.met else "NOT MET")
        if self.note:
            parts.append(self.note)
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        interval = self.found if isinstance(self.found, Interval) else None
        return {
            "value": self.value,
            "low": interval and interval.low,
            "high": interval and interval.high,
            "at_most": self.at_most,
            "at_least": self.at_least,
            "met": self.met,
            "note": self.found if isinstance(self.found, str) else self.note,
        }


F = TypeVar("F")


def figure(compute: Callable[[], F]) -> F | str:
    """Return a computed figure, or the reason why it cannot be computed."""
    try:
        return compute()
    except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
        return PROGRESS.reason or f"{type(error).__name__}: {error}"


def over_rows(
    what: Callable[[Iterable[float]], float],
    rows: Iterable[Any],
    value: str | Callable[[Any], float],
) -> float | str:
    """Return a summary, such as the median, of a value of all rows: its name or a function."""
    take = itemgetter(value) if isinstance(value, str) else value
    return figure(lambda: what([take(row) for row in rows]))


@dataclass(frozen=True)
class Results:
    """All that a bench found, ready to be shown.

    Args:
        title: of the table.
        headers: of its columns; the first and the last hold words, the others numbers.
        lines: of the table.
        remarks: lines below it.
        keys: what the bench is judged by.
        data: what the JSON holds besides the keys and the machine.
    """

    title: str
    headers: Sequence[str]
    lines: Sequence[Sequence[str]]
    remarks: Sequence[str]
    keys: Sequence[Key]
    data: Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser, *, restarts: int) -> None:
    parser.add_argument(
        "--restarts", type=positive, default=restarts, metavar="N", help=f"default {restarts}"
    )
    add_json_argument(parser)
    add_limits(parser)
    parser.add_argument("--check", action="store_true", help="exit 1 if a key is not met")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        action=_Json,
        help="write JSON there; without FILE, here",
    )


def add_limits(parser: argparse.ArgumentParser, *, minutes: float = inf) -> None:
    PROGRESS.ends_at = monotonic() + 60 * minutes
    parser.add_argument(
        "--minutes",
        type=float,
        action=_Minutes,
        help="time limit: what runs then is ended, and the results until then are shown",
    )
    parser.add_argument(
        "--quick", nargs=0, action=_Quick, help="two minutes and one round, marked in the output"
    )


class _Json(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, values)
        if values != "-":
            PROGRESS.file = Path(f"{values}.part")


class _Minutes(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, values)
        PROGRESS.ends_at = monotonic() + 60 * values


class _Quick(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.quick, PROGRESS.is_quick = True, True
        PROGRESS.ends_at = min(PROGRESS.ends_at, monotonic() + 120)
        for name in ("restarts", "runs", "seeds", "kills", "preemptions", "rounds"):
            if hasattr(namespace, name):
                setattr(namespace, name, 1)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {number}")
    return number


def finish(results: Results, arguments: argparse.Namespace) -> int:
    """Show the results, write the JSON if asked to, and return the exit code."""
    # Where the JSON goes to stdout, nothing else may.
    console = Console(stderr=arguments.json == "-", highlight=False)
    if not console.is_terminal:
        console.width = 120
    if PROGRESS.is_quick:
        console.print("--quick: one round and two minutes: do not compare figures", markup=False)
    table = Table(title=results.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, header in enumerate(results.headers):
        words = number in (0, len(results.headers) - 1)
        table.add_column(header, justify="left" if words else "right", no_wrap=not words)
    for line in results.lines:
        table.add_row(*map(escape, line))
    console.print(table)
    for remark in (*results.remarks, *_ended_early()):
        console.print(remark, markup=False, soft_wrap=True)
    for key in results.keys:
        console.print(key.words, markup=False, soft_wrap=True)
    if arguments.json:
        write_json(results, arguments.json)
    is_missed = arguments.check and any(key.met is False for key in results.keys)
    return PROGRESS.code or int(is_missed or bool(PROGRESS.failures))


def _ended_early() -> list[str]:
    over = [f"{PROGRESS.over}: these are the results until then"] if PROGRESS.over else []
    return [*over, *PROGRESS.failures]


def write_json(results: Results, where: str) -> None:
    text = json.dumps(as_data(results), indent=1, default=plain)
    if where == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(where).write_text(text + "\n")
        Path(f"{where}.part").unlink(missing_ok=True)


def as_data(results: Results) -> dict[str, Any]:
    """All that the JSON holds: the run, its tables as words, keys, and the bench's own data."""
    machine = fingerprint()
    return {
        "command": command_words(sys.argv),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "hardware": machine.words,
        **({"quick": True} if PROGRESS.is_quick else {}),
        "machine": machine.as_dict(),
        "tables": [
            {
                "title": results.title,
                "headers": list(results.headers),
                "lines": [list(line) for line in results.lines],
            }
        ],
        "remarks": [*results.remarks, *_ended_early()],
        "keys": {key.name: key.value for key in results.keys},
        "details": {key.name: key.as_dict() for key in results.keys},
        **({"measured": PROGRESS.kept} if PROGRESS.reason else {}),
        **results.data,
    }


def command_words(argv: Sequence[str]) -> str:
    """The command, without the place of its JSON and without the folders of this machine."""
    words = []
    for before, word in pairwise(argv):
        is_its_file = before == "--json" and not word.startswith("--")
        if not (is_its_file or word.startswith("--json")):
            words.append("DIR" if Path(word).is_absolute() else word)
    return shlex.join(["python", f"bench/{Path(argv[0]).name}", *words])


def commit() -> str | None:
    """The commit that was measured, `-dirty` behind it where files differ; None outside of git."""
    described = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            described, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def lines_of(
    rows: Mapping[str, Row], reference: str, *figures: Callable[[float], str]
) -> list[list[str]]:
    """A line for each peer: name, figures, range over restarts, time ratio, accuracy, remark.

    Args:
        rows: by name.
        reference: the name of the row that the others' times are divided by.
        figures: words for seconds per step; the range is in those of the first.
    """
    lines = []
    for name, row in rows.items():
        if not row.measured:
            lines.append([name, *("" for _ in figures), "", "", "", row.reason])
            continue
        against = ratio(rows, name, reference)
        lines.append(
            [
                name,
                *(figure(median(row.seconds)) for figure in figures),
                f"{figures[0](min(row.seconds))} .. {figures[0](max(row.seconds))}",
                "" if isinstance(against, str) else interval_words(against),
                f"{mean(row.accuracies):.1%}" if row.accuracies else "",
                "",
            ]
        )
    return lines


def notes_of(rows: Mapping[str, Row]) -> list[str]:
    """What the peers said about themselves, a line for each restart."""
    return [
        f"{name}, restart {n}: {note}"
        for name, row in rows.items()
        for n, note in enumerate(row.notes, 1)
        if note
    ]


def rows_as_data(rows: Mapping[str, Row], reference: str) -> list[dict[str, Any]]:
    """The same as plain data, with every restart's numbers."""
    data = []
    for name, row in rows.items():
        against = ratio(rows, name, reference)
        data.append(
            {
                "name": name,
                "seconds_per_step": row.seconds,
                f"time_vs_{reference}": None if isinstance(against, str) else against._asdict(),
                "accuracies": row.accuracies,
                "first_seconds_per_step": row.first_seconds,
                "notes": row.notes,
                "reason": row.reason,
            }
        )
    return data


def interval_words(interval: Interval) -> str:
    return f"{_number(interval.mid)} [{_number(interval.low)}, {_number(interval.high)}]"


def _number(value: float) -> str:
    return f"{value:.4g}"
