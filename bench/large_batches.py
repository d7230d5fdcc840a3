"""Accuracy after the same epochs, with a larger batch and each learning-rate rule.

    python bench/large_batches.py --data DIR [--restarts 5] [--json [FILE]]

A small MLP (784-128-128-10 with BatchNorm) on the 28x28 images of a folder of IDX files (MNIST,
Fashion-MNIST), one thread, `allow="exact"`. The rate of SGD was found with batch 64, those of LARS
and LAMB with 512 (from there they follow the square root), on another seed. Restarts are seeds: of
the weights, and of the order of the samples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import torch
from torch import nn

import flatout
from flatout import LrRule
from flatout.data import Arrays, idx_split
from restarts import each, tell
from results import Key, Results, add_arguments, figure, finish, positive

REFERENCE = 64
LARGE = (512, 2048)
# The best of 0.003, 0.01, 0.03 and 0.1 with batch 64.
SGD = 0.03
# The best of 1, 3, 10 and 30, and of 0.003, 0.01, 0.03 and 0.1, with batch 512.
LARS, LAMB = 3.0, 0.01


@dataclass(frozen=True)
class Way:
    """How to train with some batch.

    Args:
        name: in the table.
        batch: samples of a step.
        rule: of the learning rate; None for the optimizer's own rate.
        optimizer: a callable that takes the parameters.
    """

    name: str
    batch: int
    rule: LrRule | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = field(
        default=lambda parameters: torch.optim.SGD(parameters, lr=SGD, momentum=0.9)
    )


def ways(batches: Sequence[int], warm_up: float) -> list[Way]:
    found = [Way("as the rate was found", REFERENCE)]
    for batch in batches:
        found += [
            Way("none", batch, LrRule("none", REFERENCE)),
            Way("sqrt", batch, LrRule("sqrt", REFERENCE)),
            Way("power 0.75", batch, LrRule("power", REFERENCE, exponent=0.75)),
            Way("linear", batch, LrRule("linear", REFERENCE)),
            Way("linear, warm-up", batch, LrRule("linear", REFERENCE, warm_up=warm_up)),
            Way("LARS", batch, LrRule("sqrt", 512), lambda p: flatout.optim.Lars(p, lr=LARS)),
            Way("LAMB", batch, LrRule("sqrt", 512), lambda p: flatout.optim.Lamb(p, lr=LAMB)),
        ]
    return found


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 128, bias=False),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 128, bias=False),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def accuracy(way: Way, seed: int, train: Any, held_out: Any, epochs: int) -> float:
    """On the samples held out; 0.1 or so, by chance, where training blew up."""
    model = network(seed)
    trainer = flatout.Trainer(
        model,
        optimizer=way.optimizer,
        lr_rule=way.rule,
        metrics=["accuracy"],
        allow="exact",
        seed=seed,
        say=lambda line: None,
    )
    try:
        trainer.fit(train, batch_size=way.batch, epochs=epochs, progress=False)
    except flatout.errors.NumbersError:
        return 0.0
    return trainer.evaluate(*held_out)["accuracy"]


def pixels(arrays: Arrays, count: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    return arrays.inputs[:count].float() * arrays.scale, arrays.targets[:count]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=5)
    parser.add_argument("--data", metavar="DIR", required=True, help="a folder of IDX files")
    parser.add_argument("--epochs", type=positive, default=10)
    parser.add_argument("--images", type=positive, help="of the training images; all by default")
    parser.add_argument("--batches", type=positive, nargs="+", default=LARGE)
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    torch.set_num_threads(1)
    whole, rest = idx_split(arguments.data)
    train, held_out = pixels(whole, arguments.images), pixels(rest, None)
    chosen = ways(arguments.batches, warm_up=arguments.epochs / 5)
    found: dict[tuple[str, int], list[float]] = {(way.name, way.batch): [] for way in chosen}

    def measure(unit: tuple[int, Way]) -> None:
        seed, way = unit
        reached = accuracy(way, seed, train, held_out, arguments.epochs)
        found[way.name, way.batch].append(reached)
        tell(f"seed {seed}, {way.name}, {way.batch}: {reached:.2%}")

    each(product(range(arguments.restarts), chosen), measure)
    lines = [
        [name, f"{batch:,}", str(-(-len(train[1]) // batch)),
         f"{mean(reached):.2%}" if reached else "",
         " ".join(f"{one:.2%}" for one in reached)]
        for (name, batch), reached in found.items()
    ]  # fmt: skip
    results = Results(
        title=f"{len(train[1]):,} images, {arguments.epochs} epochs, the rate found with batch "
        f"{REFERENCE}; seeds: {arguments.restarts}",
        headers=["", "batch", "steps an epoch", "accuracy", "by seed"],
        lines=lines,
        remarks=[],
        keys=[
            Key(
                f"{name} at {batch}".replace(", ", "_").replace(" ", "_"),
                figure(partial(mean, reached)),
            )
            for (name, batch), reached in found.items()
        ],
        data={"accuracy": {f"{name}, {batch}": one for (name, batch), one in found.items()}},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
