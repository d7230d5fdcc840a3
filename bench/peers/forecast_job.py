"""A ddp job whose computing is sleep, so that ranks on one machine do not hold each other up.

    flatout run [--nodes N ...] forecast_job.py RUN --reduction ring --steps 60

Each layer sleeps in its backward, and its gradients are sent while the next one sleeps, as where a
GPU or other cores compute. What a rank adds up and sends is real.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import flatout
from flatout.recipe import Recipe, World

WIDTH, LAYERS, SAMPLES_EACH = 512, 8, 16


class Sleep(torch.autograd.Function):
    """Sleeps in the backward, for so long for each sample."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds * len(gradient))
        return gradient, None


class Slept(nn.Module):
    """A chain of layers that take `ms` in the forward and twice as much in the backward.

    Args:
        ms: of the forward of one sample, of all layers.
    """

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)
        self.seconds = ms / 1e3 / LAYERS

    def forward(self, x):
        for layer in self.layers:
            time.sleep(self.seconds * len(x))
            x = Sleep.apply(torch.relu(layer(x)), 2 * self.seconds)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--reduction", default="all_reduce")
    parser.add_argument("--ranks", type=int, default=1, help="the batch is as large for each")
    parser.add_argument("--ms", type=float, default=1.0, help="forward of a sample")
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    batch = SAMPLES_EACH * asked.ranks
    x = torch.randn(batch * asked.steps, WIDTH)
    y = torch.arange(len(x)) % 4
    recipe = Recipe(world=World(reduction=asked.reduction))
    trainer = flatout.Trainer(
        Slept(asked.ms), optimizer="sgd", lr=0.01, recipe=recipe, allow="exact", run=asked.run
    )
    trainer.fit((x, y), batch_size=batch, progress=False)


if __name__ == "__main__":
    main()
