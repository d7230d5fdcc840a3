"""A rank that is a parameter server, and one that pushes to it: `world.staleness=unbounded`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import servers_job
import torch

from flatout.strategies import AsynchronousServers
from flatout.world import join


def main() -> None:
    asked = servers_job.arguments()
    torch.set_num_threads(1)
    world = join()
    model = torch.nn.ParameterList([torch.zeros(asked.megabytes << 18)])
    [weights] = model.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=servers_job.RATE)
    servers = AsynchronousServers(world, model, [optimizer], 1, print, staleness=None, spare=0)
    servers.begin()
    servers.before_step(1, [weights])
    gradient = torch.ones_like(weights)

    def once() -> float:
        weights.grad = gradient
        optimizer.step()
        return float(weights[0].detach())

    if not world.is_first:
        servers_job.measure(asked, once)
    world.wait("end of the round trips")
    servers.close()


def start_ranks(sockets: bool) -> int:
    """Start this script again as each rank; of two nodes where no memory is to be shared."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    beside = 1 if sockets else 2
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": str(beside),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={
                **os.environ,
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % beside),
                "GROUP_RANK": str(rank // beside),
            },
        )
        for rank in range(2)
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(start_ranks(servers_job.arguments().sockets))
