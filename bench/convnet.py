"""A small ConvNet under Flatout's defaults and under its peers, each in fp32 and bf16.

    python bench/convnet.py [--data DIR] [--restarts 7] [--json [FILE]]

conv32-pool-conv64-pool-conv64-dense64-dense10 on 28x28, batch 512, Adam, 10,240 images in memory,
all usable CPUs. `--data` names a folder of IDX files (MNIST, Fashion-MNIST); without it the images
are made up, and whether training gives the same accuracy is not measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch

import limits
from flatout.data import Arrays, idx_split
from flatout.measure import usable_cpus
from restarts import (
    PEERS,
    Peer,
    PeerFailed,
    Row,
    ratio,
    run_in_turn,
    run_once,
    tell,
    versions,
)
from results import Key, Results, add_arguments, finish, lines_of, positive, rows_as_data

sys.path.append(str(PEERS))
import convnet_torch
from convnet_job import BATCH, CLASSES, SIDE, Images, save

FLATOUT, AGAIN, PLAIN = "flatout", "flatout-again", "torch-fp32"
IMAGES, HELD_OUT = 10_240, 2_048
ACCURACY_EPOCHS = 5
HEADERS = (
    *("", "images/s", limits.HEADER, "fastest .. slowest"),
    *("time / flatout's", "accuracy", ""),
)


def peers(images: Path, epochs: int, threads: int) -> list[Peer]:
    shared = ("--images", str(images), "--epochs", str(epochs), "--threads", str(threads))
    chosen = [
        Peer(FLATOUT, "convnet_flatout.py", shared, ("torch", "flatout")),
        Peer(AGAIN, "convnet_flatout.py", shared, ("torch", "flatout")),
    ]
    for precision in ("fp32", "bf16"):
        given = (*shared, "--precision", precision)
        chosen += [
            Peer(f"torch-{precision}", "convnet_plain.py", given, ("torch",)),
            Peer(f"lightning-{precision}", "convnet_lightning.py", given, ("torch", "lightning")),
        ]
        chosen += [
            Peer(
                f"keras-{backend}-{precision}",
                "convnet_keras.py",
                (*given, "--backend", backend),
                (backend, "keras"),
            )
            for backend in ("torch", "tensorflow", "jax")
        ]
    return chosen


# -- images --------------------------------------------------------------------------------------


def made_up(count: int, seed: int) -> Images:
    """Noisy copies of one random picture a class, which a ConvNet learns."""
    random = np.random.default_rng(seed)
    pictures = np.random.default_rng(0).random((CLASSES, SIDE, SIDE), dtype=np.float32)
    labels = random.integers(0, CLASSES, count)
    noise = random.random((count, SIDE, SIDE), dtype=np.float32)
    return Images((pictures[labels] + 3 * noise) / 4, labels)


def from_idx(arrays: Arrays) -> Images:
    """Pixels from 0 to 1, as every peer gets them."""
    images = arrays.inputs.squeeze(1).numpy()
    if images.shape[1:] != (SIDE, SIDE):
        raise SystemExit(f"--data: expected images of {SIDE}x{SIDE}, found {images.shape[1:]}")
    return Images(images * np.float32(arrays.scale), arrays.targets.numpy())


def repeated(images: Images, count: int) -> Images:
    """The first `count` images, from the start again where there are fewer."""
    index = np.resize(np.arange(len(images.labels)), count)
    return Images(images.images[index], images.labels[index])


# -- keys ----------------------------------------------------------------------------------------


def speed_keys(rows: dict[str, Row]) -> list[Key]:
    others = [row for name, row in rows.items() if name not in (FLATOUT, AGAIN)]
    ran = [row for row in others if row.measured]
    if ran:
        best = min(ran, key=lambda row: median(row.seconds)).peer.name
        against_best = ratio(rows, best, FLATOUT)
        note = f"against {best}, the best of {len(ran)} of {len(others)} peers"
    else:
        against_best, note = "no peer ran", ""
    return [
        Key("vs_plain_torch", ratio(rows, PLAIN, FLATOUT), at_least=4),
        Key("vs_best_peer", against_best, at_least=1.05, note=note),
        Key("flatout_vs_itself", ratio(rows, AGAIN, FLATOUT), note="A/A: what noise makes of 1"),
    ]


def same_accuracy(plain: Sequence[float], flatout: Sequence[float]) -> Key:
    """How far the mean accuracies over the seeds lie apart."""
    found = abs(mean(plain) - mean(flatout))
    note = f"held out: plain {_percents(plain)}, Flatout {_percents(flatout)}"
    return Key("same_accuracy", found, at_most=0.002, note=note)


def measure_accuracy(
    images: Path, seeds: int, threads: int, tell: Callable[[str], None]
) -> tuple[Key, dict[str, list[float]]]:
    """Train both sides once for each seed, in turn."""
    found: dict[str, list[float]] = {"plain": [], "flatout": []}
    shared = ("--images", str(images), "--epochs", str(ACCURACY_EPOCHS), "--threads", str(threads))
    for seed in range(seeds):
        for name, accuracies in found.items():
            peer = Peer(name, f"accuracy_{name}.py", (*shared, "--seed", str(seed)))
            try:
                result = run_once(peer)
            except PeerFailed as error:
                return Key("same_accuracy", f"{name} failed: {error}", at_most=0.002), found
            accuracies.append(result["accuracy"])
            tell(f"accuracy, seed {seed}, {name}: {accuracies[-1]:.2%} {result['note']}")
    return same_accuracy(found["plain"], found["flatout"]), found


def _percents(accuracies: Sequence[float]) -> str:
    seeds = " ".join(f"{accuracy:.2%}" for accuracy in accuracies)
    return f"{mean(accuracies):.2%} ({seeds})"


# -- the bench -----------------------------------------------------------------------------------


def images_per_second(seconds: float) -> str:
    return f"{BATCH / seconds:,.0f}"


def of_matmul(threads: int) -> Callable[[float], str]:
    """Words for seconds per step, against what this machine could do."""
    flops = limits.step_flops(convnet_torch.model(0), torch.zeros(BATCH, 1, SIDE, SIDE))
    return limits.share_of_matmul(flops, threads)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=7)
    parser.add_argument("--data", metavar="DIR", help="a folder of IDX files")
    parser.add_argument("--epochs", type=positive, default=5, help="timed epochs a process")
    parser.add_argument("--images", type=positive, default=IMAGES, help="images in an epoch")
    parser.add_argument("--seeds", type=positive, default=3, help="runs for same_accuracy")
    names = [peer.name for peer in peers(Path(), 1, 1)]
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="PEER")
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    threads = usable_cpus()
    accuracy = Key("same_accuracy", "needs --data", at_most=0.002)
    accuracies: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        for_speed, for_accuracy = Path(folder, "speed.npz"), Path(folder, "accuracy.npz")
        if arguments.data:
            train, held_out = map(from_idx, idx_split(arguments.data))
            save(for_accuracy, train, held_out)
        else:
            train, held_out = made_up(arguments.images, 1), made_up(HELD_OUT, 2)
        save(for_speed, repeated(train, arguments.images), held_out)

        chosen = peers(for_speed, arguments.epochs, threads)
        rows = run_in_turn(chosen, restarts=arguments.restarts, only=arguments.only, tell=tell)
        if arguments.data:
            accuracy, accuracies = measure_accuracy(for_accuracy, arguments.seeds, threads, tell)

    results = Results(
        title=f"ConvNet 28x28, batch {BATCH}, threads: {threads}; "
        f"restarts of each: {arguments.restarts}",
        headers=HEADERS,
        lines=lines_of(rows, FLATOUT, images_per_second, of_matmul(threads)),
        remarks=[f"flatout, restart {n}: {note}" for n, note in enumerate(rows[FLATOUT].notes, 1)],
        keys=[*speed_keys(rows), accuracy],
        data={
            "rows": rows_as_data(rows, FLATOUT),
            "accuracy": accuracies,
            "versions": versions(chosen),
        },
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
