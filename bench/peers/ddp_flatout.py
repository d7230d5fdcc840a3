"""Flatout's Trainer on two ranks, where nothing may differ from the plain job: `allow="exact"`."""

from __future__ import annotations

import os
import sys
from functools import partial

import ddp_job
import ddp_torch
import torch
from flatout_clock import Clock
from stamps import Stamps, report

import flatout


def main() -> None:
    arguments = ddp_job.arguments()
    # Every restart decides for itself, as on a machine that has never seen the job.
    os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    inputs, labels = ddp_torch.tensors(arguments.samples)
    model = ddp_torch.model()
    stamps = Stamps()
    decisions: list[str] = []
    trainer = flatout.Trainer(
        model,
        loss="cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=ddp_job.LEARNING_RATE, fused=True),
        allow="exact",
        recipe=flatout.Recipe(process={"threads": ddp_job.THREADS}),
        say=decisions.append,
    )
    trainer.fit(
        (inputs, labels),
        batch_size=ddp_job.BATCH,
        epochs=1 + arguments.epochs,
        callbacks=[Clock(stamps)],
        progress=False,
    )
    if trainer.world().is_first:
        steps = len(inputs) // ddp_job.BATCH
        accuracy = ddp_torch.accuracy(model, inputs, labels)
        report(arguments.out, stamps, steps=steps, accuracy=accuracy, note="; ".join(decisions))
    trainer.world().wait()


if __name__ == "__main__":
    if ddp_job.is_rank():
        main()
    else:
        sys.exit(ddp_job.start_ranks())
