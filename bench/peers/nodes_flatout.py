"""Flatout's Trainer as plain as torch, but for how gradients are added up."""

from __future__ import annotations

import os

import nodes_job
import torch

import flatout
from flatout.recipe import PLAIN
from flatout.recipe.overrides import apply


class Until(flatout.Callback):
    every = nodes_job.EVERY

    def __init__(self, until: nodes_job.UntilLoss, decides: bool) -> None:
        self.until, self.decides, self.done = until, decides, False

    def on_epoch_start(self, state: flatout.FitState) -> None:
        self.until.start() if state.step == 0 else None

    def on_step(self, state: flatout.FitState) -> None:
        if not self.done and self.until.reached():
            self.done = self.decides
            if self.decides:
                state.stop("the loss is reached")


def main() -> None:
    arguments = nodes_job.arguments()
    os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    (x, y), held_out = nodes_job.load(arguments.images)
    is_first = os.environ["RANK"] == "0"
    model = nodes_job.model()
    until = nodes_job.UntilLoss(model, *held_out, arguments.loss)
    # What may be set in code is as in plain torch; then only the reduction differs.
    plain = {**PLAIN, "process.threads": 1}
    recipe = apply(flatout.Recipe().replace(plain), arguments.set)
    trainer = flatout.Trainer(
        model,
        optimizer=nodes_job.optimizer(list(model.parameters())),
        recipe=recipe,
        allow="exact",
    )
    trainer.fit(
        (x, y),
        batch_size=nodes_job.BATCH,
        epochs=nodes_job.MOST_EPOCHS,
        callbacks=[Until(until, is_first or recipe.world.strategy != "local_sgd")],
        progress=False,
    )
    if is_first:
        until.report(arguments.out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
