"""The job of bench/transfer.py: VGG16, whose last block and a new Dense learn four classes."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import psutil
from stamps import Stamps

BATCH = 32
LEARNING_RATE = 1e-4
CLASSES = 4
# Width and convolutions of each block.
BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))

# On the clock of `Stamps`.
BEGAN = time.perf_counter() - (time.time() - psutil.Process().create_time())


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True, help="a folder for each class")
    parser.add_argument("--size", type=int, default=224, help="that images are shrunk to")
    parser.add_argument("--epochs", type=int, default=1, help="after the first one")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--head-only", action="store_true", help="train nothing but the Dense")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes of a DataLoader")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    return parser


def files(folder: Path) -> tuple[list[str], list[int]]:
    """Paths of the images, and the numbers of their classes."""
    paths, labels = [], []
    for number, name in enumerate(sorted(entry.name for entry in folder.iterdir())):
        found = sorted(map(str, (folder / name).iterdir()))
        paths += found
        labels += [number] * len(found)
    return paths, labels


def live_flops(size: int) -> float:
    """Of the layers that learn, for one image: forward, and gradients of weights and inputs."""
    width, convolutions = BLOCKS[-1]
    one = 2 * 9 * width * width * (size // 16) ** 2
    dense = 2 * width * (size // 32) ** 2 * CLASSES
    # Nothing asks for the gradient of the block's input.
    return (3 * convolutions - 1) * one + 3 * dense


def report(
    out: Path, stamps: Stamps, *, images: int, since: float = BEGAN, note: str = "", **more: object
) -> None:
    """Write what was measured.

    Args:
        out: where to.
        stamps: with a mark at the end of each epoch.
        images: in an epoch.
        since: what the first epoch counts from: the start of the process, with all that is
            imported, opened and built, or another reading of the clock.
        note: what the peer says about itself.
        more: what else the result holds.
    """
    result = {
        "epoch_seconds": stamps.epoch_seconds(),
        "first_seconds": stamps.readings[0] - since,
        "steps": -(-images // BATCH),
        "note": note,
        **more,
    }
    out.write_text(json.dumps(result))
