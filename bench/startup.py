"""How long Flatout keeps a user waiting before anything begins.

    python bench/startup.py [--restarts 15] [--json [FILE]]

`import flatout` is the time of `python -c 'import flatout'` less that of `python -c pass` in the
same round; `flatout --help` is the time of the whole process.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from flatout.measure import Interval
from restarts import PROGRESS, PeerFailed, each, report_of, tell
from results import Key, Results, add_arguments, finish, interval_words

PYTHON, AGAIN, IMPORT, HELP = "python", "python-again", "import flatout", "flatout --help"


def commands() -> dict[str, list[str]]:
    """What is timed, by name. The command is the one installed beside this Python."""
    return {
        PYTHON: [sys.executable, "-c", "pass"],
        IMPORT: [sys.executable, "-c", "import flatout"],
        HELP: [str(Path(sysconfig.get_path("scripts"), "flatout")), "--help"],
        AGAIN: [sys.executable, "-c", "pass"],
    }


def milliseconds(command: Sequence[str]) -> float:
    began = time.perf_counter()
    report_of(command, Path.cwd())
    return (time.perf_counter() - began) * 1e3


def time_in_turn(wanted: Mapping[str, list[str]], rounds: int) -> dict[str, list[float] | str]:
    """The milliseconds of each command in each round, or why there are none."""
    found: dict[str, list[float] | str] = {}
    for name, command in wanted.items():
        try:
            milliseconds(command)  # writes the bytecode and fills the file cache
            found[name] = []
        except FileNotFoundError:
            found[name] = f"absent: {Path(command[0]).name} is not installed"
        except PeerFailed as error:
            found[name] = f"failed: {error}"
    timed = [name for name, times in found.items() if isinstance(times, list)]
    orders = [timed if turn % 2 == 0 else timed[::-1] for turn in range(rounds)]

    def time_all(names: Sequence[str]) -> dict[str, float]:
        once = {name: milliseconds(wanted[name]) for name in names}
        tell(", ".join(f"{name} {once[name]:.1f} ms" for name in timed))
        return once

    rows = each(orders, time_all)
    return found | {name: [row[name] for row in rows] or PROGRESS.reason for name in timed}


def median_interval(values: Sequence[float]) -> Interval:
    """The median with its 95% interval: the percentile bootstrap over rounds."""
    array = np.asarray(values)
    drawn = np.random.default_rng(0).integers(0, len(array), (2000, len(array)))
    low, high = np.quantile(np.median(array[drawn], axis=1), [0.025, 0.975])
    return Interval(float(low), float(np.median(array)), float(high))


def difference(found: Mapping[str, list[float] | str], more: str, less: str) -> Interval | str:
    """The median over rounds of one command's time less another's, or why there is none."""
    longer, shorter = found[more], found[less]
    if isinstance(longer, str):
        return longer
    if isinstance(shorter, str):
        return shorter
    return median_interval([a - b for a, b in zip(longer, shorter, strict=True)])


def keys(found: Mapping[str, list[float] | str]) -> list[Key]:
    whole = found[HELP]
    return [
        Key("import_ms", difference(found, IMPORT, PYTHON), at_most=50),
        Key("help_ms", whole if isinstance(whole, str) else median_interval(whole), at_most=200),
        Key(
            "python_less_itself_ms",
            difference(found, AGAIN, PYTHON),
            note="A/A: what noise makes of 0",
        ),
    ]


def lines(found: Mapping[str, list[float] | str]) -> list[list[str]]:
    return [
        [name, "", "", times]
        if isinstance(times, str)
        else [name, interval_words(median_interval(times)), f"{min(times):.1f}", ""]
        for name, times in found.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=15)
    arguments = parser.parse_args()
    found = time_in_turn(commands(), arguments.restarts)
    results = Results(
        title=f"Whole processes in milliseconds; restarts of each: {arguments.restarts}",
        headers=["", "median", "fastest", ""],
        lines=lines(found),
        remarks=[],
        keys=keys(found),
        data={
            "rows": [
                {"name": name, "milliseconds": [], "reason": times}
                if isinstance(times, str)
                else {"name": name, "milliseconds": times, "reason": ""}
                for name, times in found.items()
            ]
        },
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
