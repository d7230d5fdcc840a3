"""Flatout's Trainer with no settings: what is fast here is for it to find out."""

from __future__ import annotations

import os
from functools import partial

import convnet_job
import convnet_torch
import torch
from flatout_clock import Clock
from stamps import Stamps, report

import flatout


def main() -> None:
    arguments = convnet_job.parser().parse_args()
    # Every restart decides for itself, as on a machine that has never seen the job.
    os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    train, held_out = convnet_torch.load(arguments.images)
    model = convnet_torch.model(arguments.seed)
    stamps = Stamps()
    decisions: list[str] = []
    trainer = flatout.Trainer(
        model,
        loss="cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=convnet_job.LEARNING_RATE),
        say=decisions.append,
    )
    trainer.fit(
        train.tensors,
        batch_size=convnet_job.BATCH,
        epochs=1 + arguments.epochs,
        callbacks=[Clock(stamps)],
        progress=False,
    )

    steps = -(-len(train) // convnet_job.BATCH)
    accuracy = convnet_torch.accuracy(model, held_out)
    report(arguments.out, stamps, steps=steps, accuracy=accuracy, note="; ".join(decisions))


if __name__ == "__main__":
    main()
