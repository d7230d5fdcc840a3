"""Several ranks: what a step of two costs, and how soon they go on after one was killed.

    python bench/parallel.py [--restarts 7] [--json [FILE]]

MLP 784-1024-1024-10, batch 128 on two ranks of one thread, in-memory data, Adam, gloo: the best
DDP loop that one writes by hand is the mark. Then a rank is killed under `flatout run --devices 2`,
once the first and once the second: how long until the next training step?
"""

from __future__ import annotations

import argparse
import sys

import one_node
from restarts import end_peers_on_sigterm, run_in_turn, versions
from results import Results, add_arguments, finish, lines_of, positive, rows_as_data


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=7)
    parser.add_argument("--epochs", type=positive, default=10, help="timed epochs a process")
    parser.add_argument("--samples", type=positive, default=4096, help="samples in an epoch")
    names = [peer.name for peer in (*one_node.step_peers(1, 1), *one_node.recover_peers())]
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="PEER")
    arguments = parser.parse_args()

    end_peers_on_sigterm()
    chosen = [
        *one_node.step_peers(arguments.epochs, arguments.samples),
        *one_node.recover_peers(),
    ]
    rows = run_in_turn(
        chosen,
        restarts=arguments.restarts,
        only=arguments.only,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    results = Results(
        title=f"Two ranks on one node, batch 128; restarts of each: {arguments.restarts}",
        headers=["", "ms/step, or ms", "fastest .. slowest", "time / raw-ddp's", "accuracy", ""],
        lines=lines_of(rows, one_node.RAW, lambda seconds: f"{seconds * 1e3:,.2f}"),
        remarks=[],
        keys=[*one_node.step_keys(rows), *one_node.recover_keys(rows)],
        data={"rows": rows_as_data(rows, one_node.RAW), "versions": versions(chosen)},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
