"""The job of bench/servers.py: a worker sends a gradient to a server and gets the weights back."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

ROUNDS, WARM_UP = 60, 10
RATE = 0.01


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, required=True, help="of weights, float32")
    parser.add_argument("--sockets", action="store_true", help="as on two hosts")
    return parser.parse_args()


def measure(asked: argparse.Namespace, once: Callable[[], float]) -> None:
    """Time round trips, and report each of them and what the first weight then is.

    Args:
        asked: has the file for the report.
        once: a round trip; returns the first weight.
    """
    seconds = []
    first = 0.0
    for number in range(ROUNDS + WARM_UP):
        began = perf_counter()
        first = once()
        if number >= WARM_UP:
            seconds.append(perf_counter() - began)
    told = {"epoch_seconds": seconds, "steps": 1, "note": f"{first:.4f}"}
    asked.out.write_text(json.dumps(told))
