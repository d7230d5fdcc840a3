"""The job of bench/one_node.py: an MLP whose step takes about ten milliseconds, on two ranks."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

RANKS = 2
FEATURES, HIDDEN, CLASSES = 784, 1024, 10
BATCH = 128  # of both ranks together
LEARNING_RATE = 1e-3
THREADS = 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=10, help="timed, after one of warm-up")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--bound", action="store_true", help="each rank to its own core")
    return parser.parse_args()


def data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (samples, 784) float32, and int64 labels that a linear map of them decides."""
    random = np.random.default_rng(0)
    inputs = random.standard_normal((samples, FEATURES), dtype=np.float32)
    labels = (inputs @ random.standard_normal((FEATURES, CLASSES), dtype=np.float32)).argmax(1)
    return inputs, labels.astype(np.int64)


def is_rank() -> bool:
    """Whether this process is one of the ranks, and not the one that starts them."""
    return "RANK" in os.environ


def start_ranks(count: int = RANKS) -> int:
    """Start this script again as each rank, as torchrun would; the exit code."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(THREADS),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    return max(abs(rank.wait()) for rank in ranks)
