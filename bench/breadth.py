"""`fit` with nothing set, beside the best that one writes by hand, over families of models.

    python bench/breadth.py [--seconds 30] [--restarts 1] [--only resnet gpt] [--compile]
                            [--losses] [--json [FILE]]

The planned run is as many steps as the plain loop makes in `--seconds`. By hand, each arm is a loop
over tensors in a fresh process. The default is `Trainer.fit` with an empty cache, run whole.
`default_vs_...` compares runs: by hand those steps times the median step, and compiling; by
default all seconds of the fit, with what it measures. `steady_vs_...` compares steps: the median
of the arm with that of the last third of the run.

`--losses` compares the loss after 200 steps with that of the plain loop from three seeds: whether
it lies where 95% of further seeds would (t with two degrees of freedom).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from results import Key, Results, add_arguments, finish

PEERS = Path(__file__).parent / "peers"
IMAGES = ("convnet", "resnet", "depthwise", "unet", "vit", "autoencoder", "mixer")
FAMILIES = (*IMAGES, "mlp", "gpt", "lstm", "textcnn", "tables", "graph")
LOSS_STEPS = 216  # whole epochs of the job
T_OF_TWO = 4.303  # the 97.5th percentile of Student's t


def run(family: str, arm: str, **options: Any) -> dict[str, Any]:
    """What a fresh process with an empty cache found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        arguments = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, str(PEERS / "breadth_job.py"), "--out", str(out)]
        done = subprocess.run(
            [*command, "--family", family, "--arm", arm, *arguments],
            cwd=folder,
            env={**os.environ, "FLATOUT_CACHE": f"{folder}/cache"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{family}, {arm}: {done.stderr.strip().splitlines()[-1]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def arms(family: str, *, compiles: bool) -> list[str]:
    found = ["fp32", "fused", "bf16"]
    if family in IMAGES:
        found += ["channels_last", "bf16+channels_last", "bf16+channels_last+fused"]
    else:
        found.append("bf16+fused")
    return [*found, "again", *(["compile"] if compiles else [])]


def measure(family: str, a: argparse.Namespace) -> dict[str, Any]:
    """All arms of a family, and what the default came to."""
    found: dict[str, list[dict[str, Any]]] = {}
    names = arms(family, compiles=a.compile)
    for restart in range(a.restarts):
        turn = restart % len(names)
        for arm in [*names[turn:], *names[:turn]]:
            found.setdefault(arm, []).append(run(family, "fp32" if arm == "again" else arm))
    step_s = {arm: median(one["step_s"] for one in runs) for arm, runs in found.items()}
    setup_s = {arm: median(one["setup_s"] for one in runs) for arm, runs in found.items()}
    plain = min(step_s["fp32"], step_s.pop("again"))
    steps = max(48, round(a.seconds / plain))
    fits = [run(family, "default", steps=steps) for _ in range(a.restarts)]
    for one in fits:
        (one["tuning"] or {}).pop("spans", None)  # a line for each of hundreds
    made = fits[0]["steps"]
    hand = {arm: made * step + setup_s[arm] for arm, step in step_s.items()}
    best = min(hand, key=lambda arm: hand[arm])
    steady = median(one["step_s"] for one in fits)
    fit_s = median(one["fit_s"] for one in fits)
    row = {
        "family": family,
        "steps": made,
        "plain_s": plain,
        "again": median(o["step_s"] for o in found["again"]) / step_s["fp32"],
        "hand_s": step_s,
        "best": best,
        "fit_s": fit_s,
        "step_s": steady,
        "vs_hand": hand[best] / fit_s,
        "vs_plain": made * plain / fit_s,
        "steady_vs_hand": step_s[best] / steady,
        "steady_vs_plain": plain / steady,
        "before_s": max(one["before_s"] for one in fits),
        "lost_share": max((one["before_s"] + one["lost_s"]) / one["fit_s"] for one in fits),
        "fits": fits,
    }
    if a.losses:
        seeds = [run(family, "fp32", steps=LOSS_STEPS, seed=seed)["loss"] for seed in range(3)]
        loss = run(family, "default", steps=LOSS_STEPS)["loss"]
        row["losses"] = {"plain": seeds, "default": loss}
        reach = T_OF_TWO * stdev(seeds) * math.sqrt(1 + 1 / len(seeds))
        row["within"] = abs(loss - mean(seeds)) <= reach
    return row


def most_tuning(seconds: float) -> float:
    """The share of a run that tuning may take: 0.05 up to 10 s, 0.02 from 60 s, linear between."""
    return 0.05 - 0.03 * (min(max(seconds, 10.0), 60.0) - 10.0) / 50.0


def keys(rows: list[dict[str, Any]], a: argparse.Namespace) -> list[Key]:
    steady = "the last third of the steps"
    tuned = max(rows, key=lambda r: r["lost_share"] / most_tuning(r["fit_s"]))
    found = [
        Key("default_vs_best_by_hand", median(r["vs_hand"] for r in rows), at_least=1.0),
        Key("default_vs_best_worst", min(r["vs_hand"] for r in rows), at_least=0.95),
        Key("default_vs_plain", median(r["vs_plain"] for r in rows), at_least=1.5),
        Key("default_vs_plain_worst", min(r["vs_plain"] for r in rows), at_least=1.0),
        Key("steady_vs_best_by_hand", median(r["steady_vs_hand"] for r in rows), note=steady),
        Key("steady_vs_best_worst", min(r["steady_vs_hand"] for r in rows), note=steady),
        Key("steady_vs_plain", median(r["steady_vs_plain"] for r in rows), note=steady),
        Key(
            "tuning_share",
            tuned["lost_share"],
            at_most=most_tuning(tuned["fit_s"]),
            note=f"{tuned['family']}, of {tuned['fit_s']:.0f} s, with the time before the first "
            "step: nearest to what a run of its length may take",
        ),
        Key("seconds_before_first_step", max(r["before_s"] for r in rows), at_most=6.0),
        Key(
            "share_before_first_step",
            max(r["before_s"] / (r["steps"] * r["plain_s"]) for r in rows),
            at_most=0.1,
        ),
    ]
    if a.losses:
        within = sum(r["within"] for r in rows) / len(rows)
        found.append(Key("loss_within_spread", within, at_least=1.0))
    return found


def line(row: dict[str, Any]) -> list[str]:
    def rate(seconds: float) -> str:
        return f"{row['plain_s'] / seconds:.2f}"

    return [
        row["family"],
        f"{1e3 * row['plain_s']:.1f}",
        f"{row['again']:.2f}",
        rate(row["hand_s"][row["best"]]),
        row["best"],
        f"{row['vs_plain']:.2f}",
        rate(row["step_s"]),
        f"{row['steady_vs_hand']:.2f}",
        f"{row['vs_hand']:.2f}",
        f"{row['before_s']:.2f}",
        f"{row['lost_share']:.3f}",
        row["fits"][0]["words"],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the plain run")
    parser.add_argument("--only", nargs="*", choices=FAMILIES)
    parser.add_argument("--compile", action="store_true", help="torch.compile by hand, too")
    parser.add_argument("--losses", action="store_true", help="compare losses")
    a = parser.parse_args()
    rows = []
    for family in a.only or FAMILIES:
        rows.append(measure(family, a))
        print(*line(rows[-1]), sep="  ", file=sys.stderr, flush=True)
    results = Results(
        title=f"Planned for {a.seconds:g} s of plain steps; restarts of each: {a.restarts}",
        headers=[
            "family", "plain ms", "A/A", "by hand", "which", "default", "steady",
            "steady vs hand", "vs hand", "before s", "tuning", "chosen",
        ],
        lines=[line(row) for row in rows],
        remarks=["by hand, default (whole runs), steady (last third): times as fast as plain"],
        keys=keys(rows, a),
        data={"rows": rows},
    )  # fmt: skip
    return finish(results, a)


if __name__ == "__main__":
    sys.exit(main())
