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

from restarts import Peer, each, run_once, tell
from results import Key, Results, add_arguments, finish, over_rows

KINDS = ("arrays", "waiting", "python", "numpy")
WORKERS = ("0", "thread", "1", "2", "4", "auto")


def measure(kind: str, restarts: int) -> dict[str, Any]:
    """Fits of a kind by who makes the batches, a round after the other."""
    found: dict[str, list[dict[str, Any]]] = {workers: [] for workers in WORKERS}
    for turn in range(restarts):
        for workers in WORKERS if turn % 2 == 0 else reversed(WORKERS):
            arguments = ("--kind", kind, "--workers", workers)
            found[workers].append(run_once(Peer(workers, "starved_job.py", arguments)))
            tell(f"{kind} {workers}: {found[workers][-1]['seconds']:.2f} s")
    middle = {w: median(one["seconds"] for one in fits) for w, fits in found.items()}
    return {
        "kind": kind,
        "seconds": middle,
        "chosen": ", ".join(str(one["workers"]) for one in found["auto"]),
        "fits": found,
        "best": min(s for w, s in middle.items() if w != "auto") / middle["auto"],
        "plain": middle["0"] / middle["auto"],
        "equal": float(len({one["loss"] for fits in found.values() for one in fits}) == 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=3)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS, help="kinds of Dataset")
    arguments = parser.parse_args()
    rows = each(arguments.only, lambda kind: measure(kind, arguments.restarts))
    results = Results(
        title=f"Fits of a starved Dataset, seconds; restarts of each: {arguments.restarts}",
        headers=["Dataset", *WORKERS, "auto took"],
        lines=[
            [row["kind"], *(f"{row['seconds'][w]:.2f}" for w in WORKERS), row["chosen"]]
            for row in rows
        ],
        remarks=[],
        keys=[
            Key("auto_vs_best", over_rows(min, rows, "best"), at_least=0.8, note="the worst"),
            Key("auto_vs_plain", over_rows(min, rows, "plain"), at_least=0.95, note="the worst"),
            Key("auto_vs_plain_best", over_rows(max, rows, "plain"), note="the largest gain"),
            Key(
                "equal",
                over_rows(min, rows, "equal"),
                at_least=1,
                note="1: the same loss, bit for bit",
            ),
        ],
        data={"rows": rows},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
