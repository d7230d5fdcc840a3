"""What a fit costs beyond its steps, and which share of a run goes into measuring settings.

    python bench/overhead.py [--restarts 7] [--rounds 9] [--json [FILE]]

`fit_overhead_s`: one epoch over 80,000 rows of 25 columns in batches of 1,024, by `Trainer.fit`,
less the same epoch by a plain loop over tensors in the same process; the two take turns.

`measuring_share`: seconds that `fit` takes longer for measuring settings (before the first step,
and on steps under slower ones), over seconds of the whole `fit`, with an empty cache: the largest
over jobs that last from 2 to 60 seconds, each in its own process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from flatout.measure import Interval
from restarts import PROGRESS, each, report_of, tell
from results import Key, Results, add_arguments, figure, finish, positive

SCRIPT = Path(__file__).parent / "peers" / "overhead.py"
# Model, samples, batch size, epochs: a few seconds each, and the last one about a minute.
SHARES = {
    "mlp, 20 epochs": ("mlp", 80_000, 1024, 20),
    "mlp, 100 epochs": ("mlp", 80_000, 1024, 100),
    "mlp, batch 64": ("mlp", 80_000, 64, 5),
    "convnet, 4 epochs": ("convnet", 10_240, 512, 4),
    "convnet, 20 epochs": ("convnet", 10_240, 512, 20),
    "resnet, 1 epoch": ("resnet", 6_400, 64, 1),
    "resnet, 4 epochs": ("resnet", 6_400, 64, 4),
}


def run(*arguments: str) -> dict[str, Any]:
    """What a fresh process found, which has an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
        report_of(command, folder, {"FLATOUT_CACHE": f"{folder}/cache"})
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def share_of(name: str) -> dict[str, Any]:
    found = run("--share", *map(str, SHARES[name]))
    row = {"name": name, **found, "share": found["measuring_s"] / found["fit_s"]}
    tell(f"{name}: {row['share']:.3f} of {row['fit_s']:.2f} s")
    return row


def middle(values: list[float]) -> Interval:
    """The median with its 95% interval: the percentile bootstrap."""
    array = np.asarray(values)
    drawn = np.random.default_rng(0).integers(0, len(array), (2000, len(array)))
    low, high = np.quantile(np.median(array[drawn], axis=1), [0.025, 0.975])
    return Interval(float(low), float(np.median(array)), float(high))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=7)
    parser.add_argument("--only", nargs="*", choices=list(SHARES), help="of the jobs for the share")
    parser.add_argument("--rounds", type=positive, default=9, help="fits in each process")
    arguments = parser.parse_args()
    chosen = list(SHARES) if arguments.only is None else arguments.only
    turns = range(arguments.restarts)
    runs = each(turns, lambda turn: run("--overhead", str(arguments.rounds))["differences"])
    overheads = [difference for differences in runs for difference in differences]
    rows = each([name for name in chosen for _ in turns], share_of)
    judged = [row["share"] for row in rows if 2 <= row["fit_s"] <= 60]
    results = Results(
        title=f"Measuring within a fit; restarts of each: {arguments.restarts}",
        headers=["job", "fit s", "measuring s", "share", ""],
        lines=[
            [
                row["name"],
                f"{row['fit_s']:.2f}",
                f"{row['measuring_s']:.3f}",
                f"{row['share']:.3f}",
                row["said"],
            ]
            for row in rows
        ],
        remarks=[],
        keys=[
            Key("fit_overhead_s", figure(lambda: middle(overheads)), at_most=0.02),
            Key(
                "measuring_share",
                max(judged) if judged else PROGRESS.reason or "no job lasted from 2 to 60 s",
                at_most=0.1,
                note="the largest",
            ),
        ],
        data={"rows": rows, "differences": overheads},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
