"""Resources that a job holds after many epochs and after a few: they must not grow.

    python bench/soak.py [--minutes 10] [--quick] [--only loader dataset] [--json [FILE]]

The minutes are shared by jobs of one and two ranks that read a DataLoader, a Dataset, a pipeline
with a process, and the arrays of a compiled Keras model. Each job validates and writes a checkpoint
after each short epoch. For each rank and its child processes the number of processes, their memory
(USS), descriptors, threads and mapped files in /dev/shm are recorded. Their values in the last
quarter of the epochs are compared with the second quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from results import Key, Results, add_json_argument, finish

JOB = Path(__file__).parent / "peers" / "soak_job.py"
KINDS = ("loader", "dataset", "pipeline", "keras")
HELD = ("processes", "descriptors", "threads", "shm")
# A job's memory changes a little from epoch to epoch: a smaller growth does not count.
_SHARE, _BYTES = 0.05, 16 << 20
_PATIENCE_S = 300


def soak(kind: str, ranks: int, seconds: float) -> list[list[dict[str, int]]]:
    """Return the resources that each rank held after each epoch.

    Args:
        kind: of input.
        ranks: number of ranks of the job.
        seconds: length of the training.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [Path(sys.executable).with_name("flatout"), "run", "--devices", str(ranks)]
        done = subprocess.run(
            [*command, str(JOB), kind, str(seconds), name],
            cwd=folder,
            env={**os.environ, "FLATOUT_CACHE": str(folder / "cache"), "KERAS_BACKEND": "torch"},
            capture_output=True,
            text=True,
            timeout=seconds + _PATIENCE_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{kind} on {ranks} ranks has failed:\n{done.stdout}{done.stderr}")
        files = sorted(folder.glob("rank*.jsonl"))
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def grown(epochs: list[dict[str, int]]) -> dict[str, float]:
    """Return the growth of each figure of a rank from the second quarter to the last one.

    Memory counts as grown only by more than 5% and 16 MiB. With fewer than 8 epochs return an
    empty dict.
    """
    quarter = len(epochs) // 4
    if quarter < 2:
        return {}
    early, late = epochs[quarter : 2 * quarter], epochs[-quarter:]
    result: dict[str, float] = {
        name: max(0, median(one[name] for one in late) - max(one[name] for one in early))
        for name in HELD
    }
    before = median(one["uss"] for one in early)
    more = median(one["uss"] for one in late) - before
    result["uss"] = more if more > before * _SHARE + _BYTES else 0
    return result


def row_of(kind: str, ranks: int, found: list[list[dict[str, int]]]) -> dict[str, Any]:
    """Return the last figures of a job, and the largest growth of each on any rank."""
    each = [grown(epochs) for epochs in found]
    return {
        "kind": kind,
        "ranks": ranks,
        "epochs": len(found[0]),
        "last": found[0][-1],
        "grown": {name: max(one[name] for one in each) for name in min(each, key=len)},
    }


def line_of(row: dict[str, Any]) -> list[str]:
    last, more = row["last"], [f"{n} +{v:g}" for n, v in row["grown"].items() if v]
    figures = [str(last[name]) for name in HELD]
    memory = f"{last['uss'] / 2**20:.0f}"
    name = f"{row['kind']}, {row['ranks']} ranks"
    said = ", ".join(more) or ("flat" if row["grown"] else "too few epochs: give it more minutes")
    return [name, str(row["epochs"]), *figures, memory, said]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for all jobs; default 10")
    parser.add_argument("--quick", action="store_true", help="two minutes")
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS, help="kinds of input")
    add_json_argument(parser)
    parser.add_argument("--check", action="store_true", help="exit 1 if a key is not met")
    arguments = parser.parse_args()
    minutes = 2.0 if arguments.quick else arguments.minutes
    jobs = [(kind, ranks) for kind in arguments.only for ranks in (1, 2)]
    rows: list[dict[str, Any]] = []
    stopped = ""
    try:
        for kind, ranks in jobs:
            rows.append(row_of(kind, ranks, soak(kind, ranks, 60 * minutes / len(jobs))))
            print(*line_of(rows[-1]), file=sys.stderr)
    except KeyboardInterrupt:
        stopped = "stopped by Ctrl-C before all jobs had run"
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        stopped = str(error)
    known = [row for row in rows if row["grown"]]
    bad = [row for row in known if any(row["grown"].values())]
    results = Results(
        title=f"Held after the last epoch, rank 0; {minutes:g} minutes of all jobs",
        headers=["job", "epochs", *HELD, "MiB", "grown"],
        lines=[line_of(row) for row in rows],
        remarks=[stopped] if stopped else [],
        keys=[Key("jobs_that_grow", len(bad) if known else "too few epochs", at_most=0)],
        data={"rows": rows, "quick": arguments.quick},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
