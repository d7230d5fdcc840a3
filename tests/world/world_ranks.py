"""Runs a script as the ranks of one job, each its own process, as torchrun would."""

import os
import socket
import sys
import textwrap
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import forked

PATIENCE_S = 240


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def environment(rank, size, port):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def start(script, size, folder, *arguments, loaded=forked.TRAINING):
    """Start the ranks; with one, no launcher is there."""
    path = folder / f"job{size}.py"
    path.write_text(textwrap.dedent(script))
    return start_file(path, size, folder, folder, size, *arguments, loaded=loaded)


def start_file(path, size, folder, *arguments, loaded=forked.TRAINING):
    """Start a script's ranks in a folder; with one, no launcher is there."""
    port = free_port()
    ranks = []
    for rank in range(size):
        # On a busy machine two threads wait for each other in each small operator.
        own = environment(rank, size, port) if size > 1 else {"OMP_NUM_THREADS": "1"}
        own |= {"FLATOUT_CACHE": str(folder / "cache")}
        ranks.append(forked.start([path, *arguments], folder, {**os.environ, **own}, loaded))
    return ranks


def run(script, size, folder, *arguments, loaded=forked.TRAINING):
    """What each rank printed; all must end well."""
    return finish(start(script, size, folder, *arguments, loaded=loaded))


def run_file(path, size, folder, *arguments):
    """The same of a script that is there already."""
    return finish(start_file(path, size, folder, *arguments))


def finish(ranks):
    """Wait for the ranks; what each printed."""
    try:
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, error) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, f"{out}\n{error}"
    return said


def run_served(script, nodes, servers, folder, *arguments):
    """Ranks with servers that compute nothing behind them.

    Args:
        nodes: of each rank the node that it is on; the servers are on nodes of their own then. Or
            how many ranks there are, on one node with the servers.
    """
    together = isinstance(nodes, int)
    ranks = nodes if together else len(nodes)
    own = [max(nodes) + 1 + n for n in range(servers)] if not together else []
    nodes = [0] * (ranks + servers) if together else [*nodes, *own]
    path = folder / f"served{ranks}.py"
    path.write_text(textwrap.dedent(script))
    port, started = free_port(), []
    for number, node in enumerate(nodes):
        own = environment(number, len(nodes), port) | {
            "LOCAL_RANK": str(nodes[:number].count(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(nodes[-1] + 1),
            "GLOO_SOCKET_IFNAME": "lo",
            "FLATOUT_SERVERS": str(servers),
            "FLATOUT_CACHE": str(folder / "cache"),
        }
        command = ["-m", "flatout.strategies.start", path, folder, ranks, *arguments]
        started.append(forked.start(command, folder, {**os.environ, **own}))
    return finish(started)
