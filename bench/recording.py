"""What a run folder's Profile costs each step: looking at what is used, and writing it down.

    python bench/recording.py [--restarts 5] [--json [FILE]]

Comparing a fit with a run folder and one without could not resolve microseconds of a step, so the
parts are timed directly, in a process each: the comparison with the clock after every step, a look
at CPUs and memory beside two live child processes, and writing a Profile of `--steps` steps and 256
looks. Over a run of an hour these come to so many microseconds of each of its steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from restarts import each, report_of, tell
from results import Key, Results, add_arguments, figure, finish, positive
from startup import median_interval

SCRIPT = Path(__file__).parent / "peers" / "recording.py"
STEPS_MS = (1, 10, 100)
# Seconds of a run, and how many Profiles it writes while it runs: after 2, 10, 40 and 160 s, then
# every five minutes. A look comes every two seconds at first, and half as often after 256.
HOUR, WRITES = 3600, 4 + (3600 - 160) // 300
LOOKS = 256 + 128 + 128 + 128


def run(steps: int) -> dict[str, float]:
    """Microseconds of a comparison, a look and a write, in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        said = report_of([sys.executable, str(SCRIPT), str(steps)], folder)
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    tell(", ".join(f"{name} {value:,.3g}" for name, value in found.items()))
    return found


def per_step(found: dict[str, float], step_ms: float) -> float:
    """Microseconds of each step over an hour."""
    steps = HOUR * 1e3 / step_ms
    return found["check_us"] + (LOOKS * found["look_us"] + WRITES * found["write_us"]) / steps


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=5)
    parser.add_argument("--steps", type=positive, default=65_000, help="that a Profile holds")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = each(range(arguments.restarts), lambda _: run(arguments.steps))
    steps = {
        ms: figure(partial(median_interval, [per_step(row, ms) for row in rows])) for ms in STEPS_MS
    }
    results = Results(
        title=f"Microseconds; restarts: {arguments.restarts}",
        headers=["", "median", "low", "high", ""],
        lines=[
            [name, *(f"{end:,.3g}" for end in (found.mid, found.low, found.high)), ""]
            for name, found in (
                *((part, median_interval([row[part] for row in rows])) for part in [*rows, {}][0]),
                *((f"a step of {ms} ms", found) for ms, found in steps.items()),
            )
            if not isinstance(found, str)
        ],
        remarks=[],
        keys=[
            Key(
                "recording_use_us_per_step",
                steps[10],
                at_most=1,
                note="steps of 10 ms for an hour",
            )
        ],
        data={"rows": rows},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
