"""Flatout's Trainer with no settings, on the job of accuracy_plain.py."""

from __future__ import annotations

import os

import accuracy_job
import convnet_torch
import torch
from flatout_clock import Clock
from stamps import Stamps, report

import flatout


def main() -> None:
    arguments = accuracy_job.arguments()
    os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    train, held_out = convnet_torch.load(arguments.images)
    model = convnet_torch.model(arguments.seed)
    stamps = Stamps()
    decisions: list[str] = []
    trainer = flatout.Trainer(
        model,
        loss="cross_entropy",
        optimizer=torch.optim.Adam,
        scheduler=accuracy_job.schedule(len(train), arguments.epochs),
        seed=arguments.seed,
        say=decisions.append,
    )
    trainer.fit(
        train.tensors,
        batch_size=accuracy_job.BATCH,
        epochs=arguments.epochs,
        callbacks=[Clock(stamps)],
        progress=False,
    )

    accuracy = convnet_torch.accuracy(model, held_out)
    steps = -(-len(train) // accuracy_job.BATCH)
    note = "; ".join(decisions)
    report(arguments.out, stamps, steps=steps, accuracy=accuracy, note=note)


if __name__ == "__main__":
    main()
