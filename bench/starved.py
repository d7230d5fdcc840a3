"""A Dataset that is slower than the model: what is found for it beside each way asked for.

    python bench/starved.py [--restarts 3] [--only waiting] [--json [FILE]]

Each fit runs in its own process, in turn, forwards and backwards; a fit's whole time counts,
trials included. `auto_vs_best` is the time of the fastest way that could be asked for over that of
`auto`, `auto_vs_plain` the same for `input.workers` of 0; both of the kind of Dataset for which it
is worst. All fits of a kind end with the same loss.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from restarts import Peer, run_once
from results import Key, Results, add_arguments, finish

KINDS = ("arrays", "waiting", "python", "numpy")
WORKERS = ("0", "thread", "1", "2", "4", "auto")


def run_all(kind: str, restarts: int) -> dict[str, list[dict[str, Any]]]:
    """Fits of a kind by who makes the batches, a round after the other."""
    found: dict[str, list[dict[str, Any]]] = {workers: [] for workers in WORKERS}
    for turn in range(restarts):
        for workers in WORKERS if turn % 2 == 0 else reversed(WORKERS):
            arguments = ("--kind", kind, "--workers", workers)
            found[workers].append(run_once(Peer(workers, "starved_job.py", arguments)))
            print(f"{kind} {workers}: {found[workers][-1]['seconds']:.2f} s", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=3)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS, help="kinds of Dataset")
    arguments = parser.parse_args()
    rows, best, plain, equal = [], {}, {}, True
    for kind in arguments.only:
        found = run_all(kind, arguments.restarts)
        middle = {w: median(one["seconds"] for one in fits) for w, fits in found.items()}
        best[kind] = min(s for w, s in middle.items() if w != "auto") / middle["auto"]
        plain[kind] = middle["0"] / middle["auto"]
        equal = equal and len({one["loss"] for fits in found.values() for one in fits}) == 1
        chosen = ", ".join(str(one["workers"]) for one in found["auto"])
        rows.append({"kind": kind, "seconds": middle, "chosen": chosen, "fits": found})
    results = Results(
        title=f"Fits of a starved Dataset, seconds; restarts of each: {arguments.restarts}",
        headers=["Dataset", *WORKERS, "auto took"],
        lines=[
            [row["kind"], *(f"{row['seconds'][w]:.2f}" for w in WORKERS), row["chosen"]]
            for row in rows
        ],
        remarks=[],
        keys=[
            Key("auto_vs_best", min(best.values()), at_least=0.8, note="the worst"),
            Key("auto_vs_plain", min(plain.values()), at_least=0.95, note="the worst"),
            Key("auto_vs_plain_best", max(plain.values()), note="the largest gain"),
            Key("equal", float(equal), at_least=1, note="1: the same loss, bit for bit"),
        ],
        data={"rows": rows},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
