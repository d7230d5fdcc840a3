"""What a training step costs besides the training: a tiny MLP under several trainers.

    python bench/trainer.py [--restarts 7] [--json [FILE]]

MLP 32-64-10, batch 64, one thread, 8,192 samples in memory, Adam. The best loop that one writes by
hand is the mark; how much longer does a step of each trainer take?

`trainer-captured` runs its steps as one compiled graph. It trains until that is compiled before its
clock starts: some minutes in the first round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import torch

import limits
from restarts import PEERS, Peer, Row, ratio, run_in_turn, versions
from results import Key, Results, add_arguments, finish, lines_of, positive, rows_as_data

sys.path.append(str(PEERS))
import mlp_job
import mlp_torch

HANDWRITTEN, TRAINER, AGAIN = "handwritten", "trainer", "trainer-again"
CAPTURED = "trainer-captured"
DATALOADER, LIGHTNING, ACCELERATE, KERAS = "dataloader", "lightning", "accelerate", "keras-torch"
JAX, JAX_SCAN = "jax", "jax-scan"


def peers(epochs: int, samples: int) -> list[Peer]:
    arguments = ("--epochs", str(epochs), "--samples", str(samples))
    return [
        Peer(HANDWRITTEN, "mlp_handwritten.py", arguments, ("torch",)),
        Peer(TRAINER, "mlp_trainer.py", arguments, ("torch", "flatout")),
        Peer(AGAIN, "mlp_trainer.py", arguments, ("torch", "flatout")),
        Peer(CAPTURED, "mlp_trainer.py", (*arguments, "--captured"), ("torch", "flatout")),
        Peer(DATALOADER, "mlp_dataloader.py", arguments, ("torch",)),
        Peer(ACCELERATE, "mlp_accelerate.py", arguments, ("torch", "accelerate")),
        Peer(LIGHTNING, "mlp_lightning.py", arguments, ("torch", "lightning")),
        Peer(KERAS, "mlp_keras.py", arguments, ("torch", "keras")),
        Peer(JAX, "mlp_jax.py", arguments, ("jax",)),
        Peer(JAX_SCAN, "mlp_jax.py", (*arguments, "--scan"), ("jax",)),
    ]


def keys(rows: dict[str, Row]) -> list[Key]:
    return [
        Key("trainer_vs_handwritten", ratio(rows, TRAINER, HANDWRITTEN), at_most=1.05),
        Key("lightning_vs_trainer", ratio(rows, LIGHTNING, TRAINER), at_least=3),
        Key("keras_torch_vs_trainer", ratio(rows, KERAS, TRAINER), at_least=6),
        Key("small_step_vs_jax", ratio(rows, CAPTURED, JAX), at_most=1, note="a jitted step"),
        Key("small_step_vs_jax_scan", ratio(rows, CAPTURED, JAX_SCAN), note="an epoch as one scan"),
        Key("trainer_vs_jax", ratio(rows, TRAINER, JAX), note="operator by operator"),
        Key("trainer_vs_captured", ratio(rows, TRAINER, CAPTURED)),
        Key("accelerate_vs_trainer", ratio(rows, ACCELERATE, TRAINER)),
        Key("dataloader_vs_trainer", ratio(rows, DATALOADER, TRAINER)),
        Key("trainer_vs_itself", ratio(rows, AGAIN, TRAINER), note="A/A: what noise makes of 1"),
    ]


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=7)
    parser.add_argument("--epochs", type=positive, default=20, help="timed epochs a process")
    parser.add_argument("--samples", type=positive, default=8192, help="samples in an epoch")
    names = [peer.name for peer in peers(1, 1)]
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="PEER")
    arguments = parser.parse_args()

    chosen = peers(arguments.epochs, arguments.samples)
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as cache:
        os.environ["FLATOUT_CACHE"] = cache  # the captured step is compiled once for all restarts
        rows = run_in_turn(
            chosen,
            restarts=arguments.restarts,
            only=arguments.only,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
        flops = limits.step_flops(mlp_torch.model(), torch.zeros(mlp_job.BATCH, mlp_job.FEATURES))
        of_matmul = limits.share_of_matmul(flops, mlp_job.THREADS)
    results = Results(
        title=f"MLP 32-64-10, batch 64, 1 thread; restarts of each: {arguments.restarts}",
        headers=[
            "",
            "us/step",
            limits.HEADER,
            "fastest .. slowest",
            "time / trainer's",
            "accuracy",
            "",
        ],
        lines=lines_of(rows, TRAINER, microseconds, of_matmul),
        remarks=[],
        keys=keys(rows),
        data={"rows": rows_as_data(rows, TRAINER), "versions": versions(chosen)},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
