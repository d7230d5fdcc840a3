"""A job whose computing is sleep, so that ranks on one machine do not hold each other up.

    flatout run [--nodes N ...] --set world.reduction=ring forecast_job.py RUN --steps 60

Each layer sleeps in its backward, and its gradients are sent while the next one sleeps, as where a
GPU or other cores compute. What a rank adds up and sends is real.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import flatout

LAYERS, SAMPLES_EACH = 8, 16
# Of the table of a job that has one, and how many of its rows a sample uses.
ROWS, IDS = 20_000, 32


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
        width: of each layer.
        has_table: whether samples are ids of a table's rows.
    """

    def __init__(self, ms: float, width: int, *, has_table: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, width) if has_table else nn.Identity()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.head = nn.Linear(width, 4)
        self.seconds = ms / 1e3 / LAYERS

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers:
            time.sleep(self.seconds * len(x))
            x = Sleep.apply(torch.relu(layer(x)), 2 * self.seconds)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--ranks", type=int, default=1, help="the batch is as large for each")
    parser.add_argument("--ms", type=float, default=1.0, help="forward of a sample")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=512, help="of each of eight layers")
    parser.add_argument("--table", action="store_true", help="samples are rows of a table")
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    batch = SAMPLES_EACH * asked.ranks
    samples = batch * asked.steps
    x = torch.randint(ROWS, (samples, IDS)) if asked.table else torch.randn(samples, asked.width)
    y = torch.arange(samples) % 4
    model = Slept(asked.ms, asked.width, has_table=asked.table)
    trainer = flatout.Trainer(model, optimizer="sgd", lr=0.01, allow="exact", run=asked.run)
    trainer.fit((x, y), batch_size=batch, progress=False)


if __name__ == "__main__":
    main()
