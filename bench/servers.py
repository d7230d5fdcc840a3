"""A round trip to a parameter server beside one to a Ray actor: gradient there, weights back.

    python bench/servers.py [--restarts 3] [--only PEER ...] [--json [FILE]]

1, 4 and 16 MB of float32 weights, plain SGD, one worker and one server on this machine: as ranks of
one node, which share memory, and as ranks of two nodes, which use sockets.
"""

from __future__ import annotations

import argparse
import sys

from restarts import Peer, ratio, run_in_turn, tell, versions
from results import Key, Results, add_arguments, finish, lines_of, rows_as_data

SIZES = (1, 4, 16)
WAYS = {"memory": ((), 2.5), "sockets": (("--sockets",), 1.8)}


def peers() -> list[Peer]:
    found = []
    for way, (words, _) in WAYS.items():
        for size in SIZES:
            shared = ("--megabytes", str(size), *words)
            for name, needs in (("flatout", ("torch", "flatout")), ("ray", ("ray",))):
                label = f"{name}-{way}-{size}MB"
                found.append(Peer(label, f"servers_{name}.py", shared, needs))
    again = ("--megabytes", str(SIZES[0]))
    return [*found, Peer("flatout-again", "servers_flatout.py", again, ("torch", "flatout"))]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=3)
    names = [peer.name for peer in peers()]
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="PEER")
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    rows = run_in_turn(
        peers(), restarts=arguments.restarts, only=arguments.only, tell=tell,
        figure=lambda seconds: f"{seconds * 1e6:,.0f} us",
    )  # fmt: skip
    first = f"flatout-memory-{SIZES[0]}MB"
    found = [
        Key(
            f"ps_vs_ray_{way}_{size}",
            ratio(rows, f"ray-{way}-{size}MB", f"flatout-{way}-{size}MB"),
            at_least=least,
            note=f"{size} MB",
        )
        for way, (_, least) in WAYS.items()
        for size in SIZES
    ]
    again = "A/A: what noise makes of 1"
    found.append(Key("ps_vs_itself", ratio(rows, "flatout-again", first), note=again))
    results = Results(
        title=f"A round trip, in microseconds. Restarts of each: {arguments.restarts}",
        headers=["", "median", "fastest .. slowest", f"over {first}", "", ""],
        lines=lines_of(rows, first, lambda seconds: f"{seconds * 1e6:,.0f}"),
        remarks=[],
        keys=found,
        data={
            "rows": rows_as_data(rows, first),
            "versions": versions([row.peer for row in rows.values()]),
        },
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
