"""Steps on hosts whose links are what a step waits for: of all_reduce, or with as many servers.

Hosts are network namespaces, whose links are held to a rate. A step computes little, and sends the
gradients of 4.5 M parameters: all computing hosts add them up among themselves, or each sends them
to servers on spare hosts, which step the weights for all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from lab import lab, on_host, why_not
from two_nodes import LINK

COMPUTING, MBIT = 4, 50
WAYS = ("all_reduce", "servers")
STEPS, EPOCHS = 2, 4
PORT = 29500  # of the namespace, where no one else listens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--way", choices=WAYS, default=WAYS[0])
    return parser.parse_args()


def train(asked: argparse.Namespace) -> None:
    """As a rank."""
    import torch
    from torch import nn

    import flatout
    from flatout.world import place

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    x = torch.randn(8 * COMPUTING * STEPS, 64)
    strategy = "parameter_server" if asked.way == "servers" else "ddp"
    trainer = flatout.Trainer(
        model,
        loss="mse",
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
        allow="exact",
        recipe=flatout.Recipe(world={"strategy": strategy}),
    )
    data = (x, x.repeat(1, 16))
    batch = 8 * COMPUTING
    history = trainer.fit(data, batch_size=batch, epochs=EPOCHS, progress=False)
    if place().rank == 0:
        note = {"loss": history.epochs[-1]["loss"], "hosts": COMPUTING, "mbit": MBIT}
        seconds = [epoch["seconds"] for epoch in history.epochs[1:]]
        told = {"epoch_seconds": seconds, "steps": STEPS, "note": json.dumps(note)}
        asked.out.write_text(json.dumps(told))


def start(way: str) -> int:
    """Start this script again on each host."""
    if why := why_not():
        print(why)
        return 1
    servers = COMPUTING if way == "servers" else 0
    size = COMPUTING + servers
    runs = ["-m", "flatout.strategies.start"] if servers else []
    with lab(size, MBIT) as hosts:
        processes = []
        for rank, host in enumerate(hosts):
            own = {
                "RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 1,
                "GROUP_RANK": rank,
                "GROUP_WORLD_SIZE": size,
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": LINK,
                "OMP_NUM_THREADS": 1,
                **({"FLATOUT_SERVERS": servers} if servers else {}),
            }
            command = [*on_host(host), sys.executable, *runs, *sys.argv]
            environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
            processes.append(subprocess.Popen(command, env=environment))
        return finished(processes)


def finished(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for the hosts; where one fails, end the others."""
    try:
        while any(process.poll() is None for process in processes):
            if failed := [process.returncode for process in processes if process.returncode]:
                return abs(failed[0])
            time.sleep(0.05)
        return max(abs(process.returncode) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    asked = arguments()
    if "RANK" in os.environ:
        train(asked)
    else:
        sys.exit(start(asked.way))
