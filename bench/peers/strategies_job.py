"""The job of bench/strategies.py: an MLP of 5 M parameters, on one rank or two."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import ddp_job
import torch
from torch import nn

BATCH = 256  # of all ranks together
HIDDEN, LAYERS = 1024, 4
LEARNING_RATE = 1e-4
MICRO_BATCHES = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", default="fsdp", choices=["one", "beside", "fsdp", "staged"])
    parser.add_argument("--epochs", type=int, default=5, help="timed, after one of warm-up")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--bound", action="store_true", help="each rank to its own core")
    return parser.parse_args()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(ddp_job.FEATURES, HIDDEN), nn.ReLU()]
    for _ in range(LAYERS):
        layers += [nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, ddp_job.CLASSES))


def ideal(one_rank_s: float, shares: Sequence[float], micro_batches: int = MICRO_BATCHES) -> float:
    """Seconds of a step in stages that wait for each other and for nothing else.

    A micro-batch passes all stages, and the slowest one makes all others after it.

    Args:
        one_rank_s: of a step of all layers on one rank, in as many micro-batches.
        shares: of the stages, of the time of all.
        micro_batches: into how many a batch is split.
    """
    return one_rank_s * (1 + (micro_batches - 1) * max(shares)) / micro_batches


def as_note(**facts: object) -> str:
    return json.dumps(facts)
