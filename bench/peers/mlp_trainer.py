"""Flatout's Trainer where nothing may differ from the plain job: `allow="exact"`."""

from __future__ import annotations

import os
from functools import partial

import mlp_job
import mlp_torch
import torch
from stamps import Stamps, report

import flatout


class Clock(flatout.Callback):
    def __init__(self, stamps: Stamps) -> None:
        self.stamps = stamps

    def on_epoch_end(self, state: object) -> None:
        self.stamps.mark()


def main() -> None:
    arguments = mlp_job.arguments()
    # Every restart decides for itself, as on a machine that has never seen the job.
    os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    inputs, labels = mlp_torch.tensors(arguments.samples)
    model = mlp_torch.model()
    stamps = Stamps()
    decisions: list[str] = []
    trainer = flatout.Trainer(
        model,
        loss="cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=mlp_job.LEARNING_RATE, fused=True),
        allow="exact",
        recipe=flatout.Recipe(process={"threads": mlp_job.THREADS}),
        say=decisions.append,
    )
    trainer.fit(
        (inputs, labels),
        batch_size=mlp_job.BATCH,
        epochs=1 + arguments.epochs,
        callbacks=[Clock(stamps)],
        progress=False,
    )

    steps = -(-len(inputs) // mlp_job.BATCH)
    accuracy = mlp_torch.accuracy(model, inputs, labels)
    report(arguments.out, stamps, steps=steps, accuracy=accuracy, note="; ".join(decisions))


if __name__ == "__main__":
    main()
