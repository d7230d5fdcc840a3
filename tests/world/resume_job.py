"""A small job, stopped in the middle of an epoch and resumed, on any number of ranks.

    python resume_job.py FOLDER RUN PIECES STOP_AT [resume]

Writes which samples each step has seen, in their order, and what came out.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torchmetrics.classification import MulticlassF1Score

import flatout
from flatout.world import place

EPOCHS, SAMPLES, BATCH = 3, 103, 10


class Seen(flatout.Callback):
    """The numbers of this rank's samples, by step; asks to stop after one of them."""

    every = 1

    def __init__(self, stop_at):
        self.stop_at = stop_at
        self.latest = None
        self.steps = {}

    def on_step(self, state):
        self.steps[state.step] = self.latest
        if state.step == self.stop_at:
            state.stop("enough")


def main(folder, run, pieces, stop_at, resume=""):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(SAMPLES, 20)).astype(np.float32)
    x[:, 0] = np.arange(SAMPLES) / SAMPLES
    y = rng.integers(0, 5, SAMPLES)
    torch.manual_seed(0)
    # A bias before BatchNorm has no gradient but rounding, of which Adam would make steps.
    first = nn.Linear(20, 32, bias=False)
    model = nn.Sequential(first, nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
    seen = Seen(int(stop_at))
    model.register_forward_pre_hook(
        lambda _, inputs: setattr(
            seen, "latest", (inputs[0][:, 0] * SAMPLES).round().int().tolist()
        )
    )
    trainer = flatout.Trainer(
        model,
        metrics=[MulticlassF1Score(num_classes=5, average="macro"), "accuracy"],
        lr=0.01,
        allow="exact",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 9, 0.7),
        recipe=flatout.Recipe().replace({"save.pieces": pieces, "save.every": 4}),
        run=f"{folder}/{run}",
    )
    history = trainer.fit(
        (x, y),
        batch_size=BATCH,
        epochs=EPOCHS,
        callbacks=[seen],
        progress=False,
        resume=bool(resume),
    )
    here = place()
    out = Path(folder, f"{run}-{'rest' if resume else 'begin'}-{here.rank}")
    figures = [{k: v for k, v in epoch.items() if k != "seconds"} for epoch in history.epochs]
    out.with_suffix(".json").write_text(json.dumps({"seen": seen.steps, "history": figures}))
    if here.rank == 0:
        torch.save(model.state_dict(), out.with_suffix(".pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
