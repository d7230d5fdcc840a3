"""Runs a script as the ranks of a job on several nodes, each rank on its share of the CPUs.

Nodes are network namespaces that bench/parallel.py has made; what a launcher sets is set here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from flatout.world.cpus import own_cpus
from two_nodes import ADDRESSES, LINK, on_node

PORT = 29500  # of the namespace, where no one else listens


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--script", required=True)
    parser.add_argument("--nodes", nargs="+", required=True, metavar="NAMESPACE")
    parser.add_argument("--ranks", type=int, required=True, help="on each node")
    given, rest = parser.parse_known_args()
    cpus, size = sorted(os.sched_getaffinity(0)), len(given.nodes) * given.ranks
    ranks = []
    for rank in range(size):
        node, local = divmod(rank, given.ranks)
        own = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": given.ranks,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": len(given.nodes),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": LINK,
            "OMP_NUM_THREADS": 1,
        }
        bound = ["taskset", "-c", ",".join(map(str, own_cpus(cpus, rank, size)))]
        script = str(Path(__file__).with_name(given.script))
        command = [*on_node(given.nodes[node]), *bound, sys.executable, script, "--out", given.out]
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        ranks.append(subprocess.Popen([*command, *rest], env=environment))
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
