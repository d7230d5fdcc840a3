"""`evaluate` and `predict` with nothing set, beside the loop that one writes by hand.

    python bench/evaluation.py [--seconds 5] [--restarts 3] [--only mlp lstm] [--json [FILE]]

By hand it is `model.eval()` under `torch.no_grad()` over tensors, at the batch size of training;
once more under `torch.inference_mode()`. Each arm is a process: passes over the same samples for
`--seconds`, after one that does not count. A figure is the median pass: where Flatout takes other
batches, those passes in which it measured them are among them.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from restarts import Peer, run_once
from results import Key, Results, add_arguments, finish

FAMILIES = ("mlp", "resnet", "lstm")
VERBS = ("evaluate", "predict")
ARMS = ("no_grad", "no_grad again", "inference_mode", "flatout")


def measure(family: str, verb: str, a: argparse.Namespace) -> dict[str, Any]:
    """All arms of a family, a round after the other."""
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for turn in range(a.restarts):
        for arm in ARMS if turn % 2 == 0 else reversed(ARMS):
            arguments = [
                f"--family={family}",
                f"--verb={verb}",
                f"--arm={arm.removesuffix(' again')}",
                f"--seconds={a.seconds}",
                f"--batches={a.batches}",
            ]
            found[arm].append(run_once(Peer(arm, "evaluation_job.py", tuple(arguments))))
    pass_s = {arm: median(one["pass_s"] for one in runs) for arm, runs in found.items()}
    plain = min(pass_s["no_grad"], pass_s["no_grad again"])
    values = [one["value"] for runs in found.values() for one in runs]
    return {
        "family": family,
        "verb": verb,
        "pass_s": pass_s,
        "vs_plain": plain / pass_s["flatout"],
        "again": pass_s["no_grad again"] / pass_s["no_grad"],
        "inference_mode": plain / pass_s["inference_mode"],
        "apart": (max(values) - min(values)) / max(map(abs, values)),
        "samples_at_a_time": found["flatout"][0]["size"],
    }


def line(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['verb']} {row['family']}",
        f"{1e3 * row['pass_s']['no_grad']:.1f}",
        f"{row['again']:.2f}",
        f"{row['inference_mode']:.2f}",
        f"{row['vs_plain']:.2f}",
        f"{row['apart']:.1e}",
        f"{row['samples_at_a_time']:,} at a time",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each arm")
    parser.add_argument("--batches", type=int, default=64, help="of a pass")
    parser.add_argument("--only", nargs="*", choices=FAMILIES, default=FAMILIES)
    a = parser.parse_args()
    rows = []
    for family in a.only:
        for verb in VERBS:
            rows.append(measure(family, verb, a))
            print(*line(rows[-1]), sep="  ", file=sys.stderr, flush=True)
    results = Results(
        title=f"A pass over {a.batches} batches; restarts of each: {a.restarts}",
        headers=["", "no_grad ms", "A/A", "inference_mode", "flatout", "apart", "took"],
        lines=[line(row) for row in rows],
        remarks=["inference_mode, flatout: times as fast as no_grad by hand"],
        keys=[
            Key("evaluation_vs_plain", median(r["vs_plain"] for r in rows), at_least=1.0),
            Key("evaluation_vs_plain_worst", min(r["vs_plain"] for r in rows), at_least=0.95),
            Key("inference_mode_vs_plain", median(r["inference_mode"] for r in rows)),
            Key(
                "apart",
                max(r["apart"] for r in rows),
                at_most=1e-4,
                note="losses, and sums of outputs, as a share",
            ),
        ],
        data={"rows": rows},
    )
    return finish(results, a)


if __name__ == "__main__":
    sys.exit(main())
