"""A Keras model under Flatout's Trainer and under Keras itself, on each of its backends.

    python bench/keras.py [--restarts 7] [--json [FILE]]

The ConvNet of bench/convnet.py, batch 512, Adam, 10,240 images in memory, all usable CPUs; and the
losses of 200 steps in fp32, Flatout's against `keras.Model.fit`, for four optimizers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from convnet import HEADERS, HELD_OUT, IMAGES, images_per_second, made_up, of_matmul
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
from results import Key, Results, add_arguments, finish, lines_of, notes_of, positive, rows_as_data

sys.path.append(str(PEERS))
from convnet_job import BATCH, save
from keras_job import OPTIMIZERS

# In its own folder this file would pass for Keras itself, where someone asks if it is installed.
sys.path.remove(str(Path(__file__).parent))

FLATOUT, AGAIN = "flatout", "flatout-again"
PRECISIONS = ("fp32", "bf16")
BACKENDS = ("torch", "tensorflow", "jax")


def peers(images: Path, epochs: int, threads: int) -> list[Peer]:
    shared = ("--images", str(images), "--epochs", str(epochs), "--threads", str(threads))
    needs = ("torch", "keras", "flatout")
    chosen = [
        Peer(name, "keras_flatout.py", (*shared, "--default"), needs) for name in (FLATOUT, AGAIN)
    ]
    for precision in PRECISIONS:
        given = (*shared, "--precision", precision)
        chosen.append(Peer(f"flatout-{precision}", "keras_flatout.py", given, needs))
        chosen += [
            Peer(
                f"keras-{backend}-{precision}",
                "convnet_keras.py",
                (*given, "--backend", backend),
                (backend, "keras"),
            )
            for backend in BACKENDS
        ]
    return chosen


def fastest(rows: dict[str, Row], begins: str) -> str | None:
    measured = [row for name, row in rows.items() if name.startswith(begins) and row.measured]
    return min(measured, key=lambda row: median(row.seconds)).peer.name if measured else None


def speed_keys(rows: dict[str, Row]) -> list[Key]:
    same = {p: ratio(rows, f"keras-torch-{p}", f"flatout-{p}") for p in PRECISIONS}
    found = [value for value in same.values() if not isinstance(value, str)]
    smallest = min(found, key=lambda interval: interval.mid) if found else next(iter(same.values()))
    words = ", ".join(f"{p} {v if isinstance(v, str) else f'{v.mid:.3g}'}" for p, v in same.items())
    best_torch, best = fastest(rows, "keras-torch"), fastest(rows, "keras-")
    return [
        Key("vs_keras_torch_same_precision", smallest, at_least=2, note=words),
        Key(
            "vs_keras_torch_best",
            ratio(rows, best_torch, FLATOUT) if best_torch else "no peer ran",
            at_least=3,
            note=best_torch or "",
        ),
        Key(
            "vs_keras_best_backend",
            ratio(rows, best, FLATOUT) if best else "no peer ran",
            at_least=1.05,
            note=best or "",
        ),
        Key("flatout_vs_itself", ratio(rows, AGAIN, FLATOUT), note="A/A: what noise makes of 1"),
    ]


def loss_difference(images: Path, threads: int, tell: Callable[[str], None]) -> list[Key]:
    """The largest relative difference between two curves of losses, over all optimizers."""
    keys = []
    for name, against, bound in (
        ("loss_difference", "exact", 1e-5),
        ("loss_difference_tolerant", "tolerant", None),
        ("keras_on_one_thread", "one-thread", None),  # what another rounding makes of Keras itself
    ):
        worst, notes = 0.0, []
        for optimizer in OPTIMIZERS:
            given = ("--images", str(images), "--threads", str(threads), "--optimizer", optimizer)
            peer = Peer(f"losses-{optimizer}", "keras_losses.py", (*given, "--against", against))
            try:
                result = run_once(peer)
            except PeerFailed as error:
                return [*keys, Key(name, f"{optimizer} failed: {error}", at_most=bound)]
            found = largest_difference(result["plain"], result["flatout"])
            notes.append(f"{optimizer} {found:.1e}")
            worst = max(worst, found)
            tell(f"losses, {against}, {optimizer}: {found:.2e} ({result['ran']})")
        keys.append(Key(name, worst, at_most=bound, note=", ".join(notes)))
    return keys


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Return the largest relative difference between two curves."""
    pairs = zip(losses, others, strict=True)
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=7)
    parser.add_argument("--epochs", type=positive, default=3, help="timed epochs a process")
    parser.add_argument("--images", type=positive, default=IMAGES, help="images in an epoch")
    names = [peer.name for peer in peers(Path(), 1, 1)]
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="PEER")
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    threads = usable_cpus()
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        images = Path(folder, "images.npz")
        save(images, made_up(arguments.images, 1), made_up(HELD_OUT, 2))
        differences = loss_difference(images, threads, tell)
        chosen = peers(images, arguments.epochs, threads)
        rows = run_in_turn(chosen, restarts=arguments.restarts, only=arguments.only, tell=tell)
    results = Results(
        title=f"Keras ConvNet 28x28, batch {BATCH}, threads: {threads}; "
        f"restarts of each: {arguments.restarts}",
        headers=HEADERS,
        lines=lines_of(rows, FLATOUT, images_per_second, of_matmul(threads)),
        remarks=notes_of(rows),
        keys=[*speed_keys(rows), *differences],
        data={"rows": rows_as_data(rows, FLATOUT), "versions": versions(chosen)},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
