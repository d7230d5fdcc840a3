"""What this machine could do at most: operations of a training step against those of a matmul."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from flatout.measure import machine_rates
from restarts import PeerFailed, run_part

HEADER = "of a matmul"


def step_flops(model: torch.nn.Module, inputs: torch.Tensor) -> int:
    """Operations of forward and backward; the first layer's input needs no gradient."""
    with FlopCounterMode(display=False) as counter:
        model(inputs).sum().backward()
    return int(counter.get_total_flops())


def matmul_flops_per_s(threads: int) -> float:
    """What a large matmul reaches in the precision that is fastest here."""
    found = machine_rates("cpu", threads)["flops_per_s"].values()
    return float(max(rates["matmul"]["forward"] for rates in found))


def share_of_matmul(flops: float, threads: int) -> Callable[[float], str]:
    """Words for seconds per step of so many operations, as a share of `matmul_flops_per_s`."""
    try:
        most = run_part(lambda: matmul_flops_per_s(threads))
    except PeerFailed:
        return lambda seconds: ""
    return lambda seconds: f"{flops / seconds / most:.1%}"
