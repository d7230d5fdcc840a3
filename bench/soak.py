"""Compare the resources of a job after few and after many epochs: they must not grow.

    python bench/soak.py [--minutes 10] [--only loader dataset] [--json [FILE]]

The minutes are shared by jobs of one and two ranks that read a DataLoader, a Dataset, a pipeline
with a process, and the arrays of a compiled Keras model. Each job validates and writes a checkpoint
after each short epoch. For each rank and its child processes the number of processes, their memory
(USS), descriptors, threads and mapped files in /dev/shm are recorded. Their values in the last
quarter of the epochs are compared with the second quarter.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from restarts import PROGRESS, PeerFailed, each, run_to_end, tell
from results import Key, Results, add_json_argument, add_limits, finish

JOB = Path(__file__).parent / "peers" / "soak_job.py"
KINDS = ("loader", "dataset", "pipeline", "keras")
HELD = ("processes", "descriptors", "threads", "shm")
# A job's memory changes a little from epoch to epoch: a smaller growth does not count.
_SHARE, _BYTES = 0.05, 16 << 20
_PATIENCE_S = 300
_TRAINING = 0.8  # the share of a job's time for training; the rest is for its start and end


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
        out, err, code = run_to_end(
            [*map(str, command), str(JOB), kind, str(seconds), name],
            folder,
            seconds + _PATIENCE_S,
            {"FLATOUT_CACHE": str(folder / "cache"), "KERAS_BACKEND": "torch"},
        )
        if code != 0:
            raise PeerFailed(f"{kind} on {ranks} ranks has failed:\n{out}{err}")
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
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS, help="kinds of input")
    add_json_argument(parser)
    add_limits(parser, minutes=10)
    parser.add_argument("--check", action="store_true", help="exit 1 if a key is not met")
    arguments = parser.parse_args()
    jobs = [*product(arguments.only, (1, 2))]

    def measure(job: tuple[str, int]) -> dict[str, Any]:
        left = PROGRESS.ends_at - monotonic()
        row = row_of(*job, soak(*job, _TRAINING * left / (len(jobs) - jobs.index(job))))
        tell("  ".join(line_of(row)))
        return row

    rows = each(jobs, measure)
    known = [row for row in rows if row["grown"]]
    bad = [row for row in known if any(row["grown"].values())]
    results = Results(
        title="Held after the last epoch, rank 0",
        headers=["job", "epochs", *HELD, "MiB", "grown"],
        lines=[line_of(row) for row in rows],
        remarks=[],
        keys=[
            Key(
                "jobs_that_grow",
                len(bad) if known else PROGRESS.reason or "too few epochs",
                at_most=0,
            )
        ],
        data={"rows": rows},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
