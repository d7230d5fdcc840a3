"""VGG16 with its last block trained on a folder of JPEGs, under Flatout and under its peers.

    python bench/transfer.py [--restarts 3] [--only flatout torch-bf16] [--json [FILE]]
    python bench/transfer.py --device cuda --restarts 1 --images 512 --epochs 8 --loss-steps 0

256 images of 512x496 in four class folders, shrunk to 224x224; all of VGG16 is frozen but its last
block, and behind it stand Flatten and Dense 4; batch 32, Adam, two threads. Peers compute the
frozen layers in each epoch. The first epoch counts from the start of its process.

flatout-second-run is a process after another one with its own learning rate and the same cache.
flatout-disk begins each epoch without its store in the page cache, as if that were too small.
The losses are of images of 64x64.

On a GPU the peers are PyTorch loops whose DataLoader has 8 workers and pins its memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from sklearn.datasets import load_sample_images

from flatout.measure import bootstrap_ratio, fingerprint, usable_cpus
from input_data import write_cut
from limits import matmul_flops_per_s
from restarts import (
    PEERS,
    Peer,
    PeerFailed,
    Row,
    each,
    ratio,
    run_in_turn,
    run_once,
    run_part,
    tell,
    versions,
)
from results import Key, Results, add_arguments, finish, lines_of, notes_of, positive, rows_as_data

sys.path.append(str(PEERS))
from transfer_job import BATCH, live_flops

FLATOUT, AGAIN, PLAIN = "flatout", "flatout-again", "torch-fp32"
SECOND, MEMORY, DISK = "flatout-second-run", "flatout-memory", "flatout-disk"
HEAD, PLAIN_HEAD = "flatout-head", "torch-head"
IN_BF16 = "flatout-bf16"
OWN = (FLATOUT, AGAIN, SECOND, MEMORY, DISK, HEAD, IN_BF16)
# Of peers on a GPU.
WORKERS = 8
IMAGES, SIDE, THREADS = 256, 224, 2
EPOCHS = 5  # of the run that counts as a whole
LOSS_STEPS, LOSS_SIDE = 200, 64


def peers(images: Path, size: int, own_epochs: int, epochs: int) -> list[Peer]:
    """All peers; `own_epochs` and `epochs` are those after the first, of Flatout and of others."""
    shared = ("--images", str(images), "--size", str(size), "--threads", str(THREADS))
    given = (*shared, "--epochs", str(own_epochs))
    others = (*shared, "--epochs", str(epochs))
    ways = {
        FLATOUT: (),
        AGAIN: (),
        SECOND: ("--runs-before", "1"),
        MEMORY: ("--where", "memory"),
        DISK: ("--where", "disk", "--cold"),
        HEAD: ("--head-only",),
    }
    chosen = [
        Peer(name, "transfer_flatout.py", (*given, *way), ("torch", "flatout"))
        for name, way in ways.items()
    ]
    chosen.append(Peer(PLAIN_HEAD, "transfer_plain.py", (*others, "--head-only"), ("torch",)))
    for precision in ("fp32", "bf16"):
        in_it = (*others, "--precision", precision)
        chosen += [
            Peer(f"torch-{precision}", "transfer_plain.py", in_it, ("torch",)),
            Peer(f"lightning-{precision}", "transfer_lightning.py", in_it, ("torch", "lightning")),
        ]
        chosen += [
            Peer(
                f"keras-{backend}-{precision}",
                "transfer_keras.py",
                (*in_it, "--backend", backend),
                (backend, "keras"),
            )
            for backend in ("torch", "tensorflow")
        ]
    return chosen


def peers_on_gpu(images: Path, size: int, own_epochs: int, epochs: int, threads: int) -> list[Peer]:
    """Likewise, on a GPU."""
    shared = ("--images", str(images), "--size", str(size), "--threads", str(threads))
    shared = (*shared, "--device", "cuda", "--workers", str(WORKERS))
    given = (*shared, "--epochs", str(own_epochs))
    others = (*shared, "--epochs", str(epochs))
    ways = {FLATOUT: (), SECOND: ("--runs-before", "1"), IN_BF16: ("--compute-in", "bf16")}
    own = [
        Peer(name, "transfer_flatout.py", (*given, *way), ("torch", "flatout"))
        for name, way in ways.items()
    ]
    plain = [
        Peer(f"torch-{precision}", "transfer_plain.py", (*others, "--precision", precision))
        for precision in ("fp32", "bf16")
    ]
    return [*own, *plain]


def make_images(folder: Path, count: int) -> None:
    """Cuts of the left and right halves of two photographs, a class folder for each half."""
    halves = [
        half for photo in load_sample_images().images for half in (photo[:, :320], photo[:, 320:])
    ]
    for number, half in enumerate(halves):
        own = folder / f"class-{number}"
        own.mkdir(parents=True)
        images = range(number, count, len(halves))
        with ThreadPoolExecutor() as pool:
            jobs = [pool.submit(write_cut, half, own / f"{n:05}.jpg", seed=n) for n in images]
        for job in jobs:
            job.result()


# -- keys ----------------------------------------------------------------------------------------


def run_seconds(row: Row) -> list[float]:
    """Seconds per step of an epoch of each restart's run of `EPOCHS` epochs, the first included."""
    both = zip(row.first_seconds, row.seconds, strict=True)
    return [(first + (EPOCHS - 1) * later) / EPOCHS for first, later in both]


def best_peer(rows: dict[str, Row], seconds: Callable[[Row], list[float]]) -> str | None:
    ran = [row for row in rows.values() if row.measured and row.peer.name not in (*OWN, PLAIN_HEAD)]
    return min(ran, key=lambda row: median(seconds(row))).peer.name if ran else None


def key_of(
    rows: dict[str, Row],
    name: str,
    slower: str | None,
    faster: str,
    seconds: Callable[[Row], list[float]] = lambda row: row.seconds,
    **more: Any,
) -> Key:
    """Time of one row over that of another."""
    for row in (slower, faster):
        if row is None or not rows[row].measured:
            return Key(name, f"{row}: {rows[row].reason}" if row else "no peer ran", **more)
    return Key(name, bootstrap_ratio(seconds(rows[slower]), seconds(rows[faster])), **more)


def gpu_keys(rows: dict[str, Row]) -> list[Key]:
    """Keys on a GPU, which nothing is asked of."""

    def first(row: Row) -> list[float]:
        return row.first_seconds

    def later(row: Row) -> list[float]:
        return row.seconds

    best, best_run = best_peer(rows, later), best_peer(rows, run_seconds)
    own = min((FLATOUT, IN_BF16), key=lambda name: median(rows[name].seconds or [1e9]))
    note = f"{own} against"
    return [
        key_of(rows, "later_epochs_vs_plain", PLAIN, FLATOUT),
        key_of(rows, "later_epochs_vs_best_peer", best, own, note=f"{note} {best}"),
        key_of(rows, "first_epoch_vs_plain", PLAIN, FLATOUT, first),
        key_of(
            rows,
            "five_epochs_vs_best_peer",
            best_run,
            own,
            run_seconds,
            note=f"{note} {best_run}, from the start of the process",
        ),
        Key(
            "second_run_first_epoch_vs_later",
            bootstrap_ratio(rows[SECOND].seconds, rows[SECOND].first_seconds)
            if rows[SECOND].measured
            else f"{SECOND}: {rows[SECOND].reason}",
        ),
    ]


def speed_keys(rows: dict[str, Row], has_amx: bool) -> list[Key]:
    def later(row: Row) -> list[float]:
        return row.seconds

    def first(row: Row) -> list[float]:
        return row.first_seconds

    best, best_run = best_peer(rows, later), best_peer(rows, run_seconds)
    second: Any = f"{SECOND}: {rows[SECOND].reason}"
    if rows[SECOND].measured:
        second = bootstrap_ratio(rows[SECOND].seconds, rows[SECOND].first_seconds)
    return [
        key_of(rows, "later_epochs_vs_plain", PLAIN, FLATOUT, at_least=20),
        key_of(
            rows, "later_epochs_vs_best_peer", best, FLATOUT, at_least=2.5, note=f"against {best}"
        ),
        key_of(
            rows,
            "first_epoch_vs_plain",
            PLAIN,
            FLATOUT,
            first,
            at_least=3.5 if has_amx else 2,
            note="from the start of the process; " + ("with AMX" if has_amx else "without AMX"),
        ),
        key_of(
            rows,
            "five_epochs_vs_best_peer",
            best_run,
            FLATOUT,
            run_seconds,
            at_least=1.8,
            note=f"against {best_run}, from the start of the process",
        ),
        Key("second_run_first_epoch_vs_later", second, at_least=0.9),
        key_of(rows, "disk_vs_memory", MEMORY, DISK, at_least=0.7),
        key_of(rows, "head_only_vs_plain", PLAIN_HEAD, HEAD, at_least=100),
        Key("flatout_vs_itself", ratio(rows, AGAIN, FLATOUT), note="A/A: what noise makes of 1"),
    ]


def limit_key(rows: dict[str, Row], size: int) -> Key:
    """What later epochs compute a second, over what a matmul does."""
    name = "live_flops_vs_matmul"
    if not rows[FLATOUT].measured:
        return Key(name, rows[FLATOUT].reason)
    try:
        most = run_part(lambda: matmul_flops_per_s(THREADS))
    except PeerFailed as error:
        return Key(name, str(error))
    flops = live_flops(size) * BATCH / median(rows[FLATOUT].seconds)
    note = f"{flops / 1e9:,.0f} of {most / 1e9:,.0f} GFLOP/s, whole steps"
    return Key(name, flops / most, note=note)


# -- losses --------------------------------------------------------------------------------------


def losses(images: Path, epochs: int, where: str, *more: str) -> list[float]:
    given = ("--images", str(images), "--size", str(LOSS_SIDE), "--threads", str(THREADS))
    arguments = (*given, "--epochs", str(epochs), "--where", where, *more)
    result = run_once(Peer(where, "transfer_losses.py", arguments))
    tell(f"losses, {' '.join((where, *more))}: {result['note']}")
    found: list[float] = result["losses"]
    return found


def largest_difference(a: list[float], b: list[float]) -> float:
    """Return the largest |a - b| of two curves, relative to the values or 0.001 of the largest."""
    size = np.maximum(np.abs(a), np.abs(b))
    return float(np.max(np.abs(np.subtract(a, b)) / np.maximum(size, 1e-3 * size.max())))


def loss_keys(images: Path, count: int, steps: int) -> list[Key]:
    """How far the losses with kept features lie from those without."""
    epochs = max(2, -(-steps // -(-count // BATCH))) - 1
    note = f"{steps} steps on {LOSS_SIDE}x{LOSS_SIDE}"
    found: dict[str, float | str] = {}
    for name, more in {
        "fp32": (),
        "bf16": ("--precision", "bf16"),
        "flip": ("--flip",),
    }.items():
        try:
            pair = [losses(images, epochs, where, *more)[:steps] for where in ("off", "memory")]
            found[name] = largest_difference(*pair)
        except PeerFailed as error:
            found[name] = f"{name}: {error}"
    same: float | str = found["flip"]
    if isinstance(same, float):
        note_flip = f"{note}; the losses differ by {same:.1e}"
        same = float(same <= 1e-5)
    else:
        note_flip = ""
    differences = [found["fp32"], found["bf16"]]
    words = [value for value in differences if isinstance(value, str)]
    return [
        Key("loss_difference", words[0] if words else max(differences), at_most=1e-3, note=note),
        Key("loss_difference_fp32", found["fp32"], at_most=0, note=note),
        Key("flips_exact", same, at_least=1, note=note_flip),
    ]


# -- the bench -----------------------------------------------------------------------------------


def images_per_second(seconds: float) -> str:
    return f"{BATCH / seconds:,.1f}"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--images", type=positive, default=IMAGES, help="JPEGs in an epoch")
    parser.add_argument("--size", type=positive, default=SIDE, help="a multiple of 32")
    parser.add_argument("--epochs", type=positive, default=4, help="of Flatout after the first")
    parser.add_argument("--peer-epochs", type=positive, default=1, help="of peers after the first")
    parser.add_argument("--loss-steps", type=int, default=LOSS_STEPS, help="0: no losses")
    names = {peer.name for peer in (*peers(Path(), 32, 1, 1), *peers_on_gpu(Path(), 32, 1, 1, 1))}
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="PEER")
    return parser.parse_args()


def remarks(rows: dict[str, Row]) -> Sequence[str]:
    steps = "first epoch, from the start of the process"
    firsts = [
        f"{name}: {median(row.first_seconds):.3g} s per step of its {steps}"
        for name, row in rows.items()
        if row.measured and name != SECOND
    ]
    return [*firsts, *notes_of(rows)]


def main() -> int:
    arguments = read_arguments()
    on_gpu = arguments.device == "cuda"
    threads = usable_cpus() if on_gpu else THREADS
    keys: list[Key] = []
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        os.environ["FLATOUT_CACHE"] = f"{folder}/cache"  # the machine is measured now
        images = Path(folder, "images")
        each(["making the images"], lambda part: make_images(images, arguments.images))
        asked = (images, arguments.size, arguments.epochs, arguments.peer_epochs)
        chosen = peers_on_gpu(*asked, threads) if on_gpu else peers(*asked)
        rows = run_in_turn(chosen, restarts=arguments.restarts, only=arguments.only, tell=tell)
        if arguments.loss_steps:
            keys = loss_keys(images, arguments.images, arguments.loss_steps)
        if not on_gpu:
            keys.append(limit_key(rows, arguments.size))
    has_amx = "amx_bf16" in fingerprint().instructions
    speeds = gpu_keys(rows) if on_gpu else speed_keys(rows, has_amx)
    results = Results(
        title=f"VGG16's last block, {arguments.images} JPEGs to "
        f"{arguments.size}x{arguments.size}, batch {BATCH}, threads: {threads}; epochs after the "
        f"first; restarts of each: {arguments.restarts}",
        headers=["", "images/s", "fastest .. slowest", "time / flatout's", "", ""],
        lines=lines_of(rows, FLATOUT, images_per_second),
        remarks=remarks(rows),
        keys=[*speeds, *keys],
        data={"rows": rows_as_data(rows, FLATOUT), "versions": versions(chosen)},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
