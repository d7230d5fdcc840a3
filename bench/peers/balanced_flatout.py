"""What each of four parameter servers has of a model's weights, and how long it takes to step them.

As in Inception, one tensor is a twelfth of all weights, and two thirds of the tensors have a few
hundred. The servers' shares are stepped in turn in one process.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import nn

from flatout.strategies.servers.layout import layout_of
from flatout.strategies.servers.share import Push, describe, rates_of, share_of

SERVERS, ROUNDS, WARM_UP = 4, 60, 10


def model() -> list[nn.Parameter]:
    """94 convolutions that widen from 32 to 448 channels, each with BatchNorm, and a classifier."""
    torch.manual_seed(0)
    found: list[nn.Parameter] = []
    before = 32
    for number in range(94):
        width = 32 + 416 * number // 93 // 32 * 32
        size = 3 if number % 4 == 1 else 1
        found += [nn.Parameter(torch.randn(width, before, size, size) * 0.01)]
        found += [nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))]
        before = width
    return [*found, nn.Parameter(torch.randn(1000, 1024) * 0.01), nn.Parameter(torch.zeros(1000))]


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    parameters = model()
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    layout = layout_of(optimizer, SERVERS)
    described = [describe(optimizer, layout, server) for server in range(SERVERS)]
    shares = [share_of(own, torch.float32) for own in described]
    rates = [rate for group in optimizer.param_groups for rate in rates_of(group)]
    push = Push(0, 1, 1.0, False, rates, [True] * len(parameters))
    seconds: list[list[float]] = [[] for _ in shares]
    for server, share in enumerate(shares):
        share.values.copy_(layout.weights(server))
    gradients = [torch.full_like(share.values, 0.01) for share in shares]
    for turn in range(ROUNDS + WARM_UP):
        order = range(SERVERS) if turn % 2 else reversed(range(SERVERS))
        for server in order:
            began = perf_counter()
            shares[server].step(0, push, gradients[server])
            if turn >= WARM_UP:
                seconds[server].append(perf_counter() - began)
    note = {
        "bytes": [share.values.nbytes for share in shares],
        "ms": [median(own) * 1e3 for own in seconds],
        "largest_tensor": max(p.nbytes for p in parameters),
    }
    told = {"epoch_seconds": [sum(map(median, seconds))], "steps": 1, "note": json.dumps(note)}
    asked.out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
