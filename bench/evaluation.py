"""`evaluate` and `predict` with nothing set, beside the loop that one writes by hand.

    python bench/evaluation.py [--seconds 5] [--restarts 3] [--only mlp lstm] [--verbs predict]
                               [--json [FILE]]

By hand it is `model.eval()` under `torch.no_grad()` over tensors, at the batch size of training;
once more under `torch.inference_mode()`, and so with `torch.compile`, which is done before the
passes that count. Each arm is a process with its own cache: passes over the same samples for
`--seconds`, after one that does not count. A figure is the median pass: where Flatout takes other
batches, those passes in which it measured them are among them. The arm `long` is Flatout in a
process that lives long enough for the forward to be compiled beside its passes and measured: it is
asked to (`compute.capture = "on"`), and counts the passes after that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from itertools import product
from statistics import median
from typing import Any

from restarts import Peer, each, run_once, tell
from results import Key, Results, add_arguments, finish, over_rows

FAMILIES = ("mlp", "resnet", "lstm", "gpt", "textcnn", "vit")
MORE = ("convnet", "depthwise", "unet", "autoencoder", "tables", "graph", "mixer")
VERBS = ("evaluate", "predict")
ARMS = ("no_grad", "no_grad again", "inference_mode", "compile", "flatout", "long")


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
    row = {
        "family": family,
        "verb": verb,
        "pass_s": pass_s,
        "vs_plain": {arm: plain / seconds for arm, seconds in pass_s.items()},
        "again": pass_s["no_grad again"] / pass_s["no_grad"],
        "apart": (max(values) - min(values)) / max(map(abs, values)),
        "samples_at_a_time": found["flatout"][0]["size"],
        "compile_s": median(one["compile_s"] for one in found["compile"]),
        "graphs": [one["graph"] for one in found["long"]],
    }
    tell("  ".join(line(row)))
    return row


def line(row: dict[str, Any]) -> list[str]:
    kept = sum(one.get("chosen") == "b" for one in row["graphs"])
    return [
        f"{row['verb']} {row['family']}",
        f"{1e3 * row['pass_s']['no_grad']:.1f}",
        f"{row['again']:.2f}",
        *(f"{row['vs_plain'][arm]:.2f}" for arm in ARMS[2:]),
        f"{kept} of {len(row['graphs'])}",
        f"{row['compile_s']:.1f}",
        f"{median(one.get('compile_s', 0.0) for one in row['graphs']):.1f}",
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
    parser.add_argument("--only", nargs="*", choices=FAMILIES + MORE, default=FAMILIES)
    parser.add_argument("--verbs", nargs="*", choices=VERBS, default=VERBS)
    a = parser.parse_args()
    rows = each(product(a.only, a.verbs), lambda unit: measure(*unit, a))

    def times(what: Callable[[Iterable[float]], float], arm: str) -> float | str:
        return over_rows(what, rows, lambda row: row["vs_plain"][arm])

    results = Results(
        title=f"A pass over {a.batches} batches; restarts of each: {a.restarts}",
        headers=[
            "", "no_grad ms", "A/A", *ARMS[2:], "graph kept", "compile s", "beside s", "apart",
            "took",
        ],
        lines=[line(row) for row in rows],
        remarks=[
            "inference_mode, compile, flatout, long: times as fast as no_grad by hand",
            "compile s: of the first pass by hand, which does not count; beside s: of the child",
        ],
        keys=[
            Key("evaluation_vs_plain", times(median, "flatout"), at_least=1.0),
            Key("evaluation_vs_plain_worst", times(min, "flatout"), at_least=0.95),
            Key("long_vs_plain", times(median, "long"), at_least=1.0),
            Key(
                "long_vs_best_by_hand",
                over_rows(
                    median,
                    [row["vs_plain"] for row in rows],
                    lambda of: of["long"] / max(1.0, of["compile"], of["inference_mode"]),
                ),
            ),
            Key("inference_mode_vs_plain", times(median, "inference_mode")),
            Key(
                "apart",
                over_rows(max, rows, "apart"),
                at_most=1e-4,
                note="losses, and sums of outputs, as a share",
            ),
        ],
        data={"rows": rows},
    )  # fmt: skip
    return finish(results, a)


if __name__ == "__main__":
    sys.exit(main())
