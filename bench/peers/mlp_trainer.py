"""Flatout's Trainer where nothing may differ from the plain job: `allow="exact"`.

With `--captured` its steps run as one compiled graph, which rounds otherwise. The run is too short
to repay compiling, so the package is made before the clock starts, as by an earlier run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import mlp_job
import mlp_torch
import torch
from flatout_clock import Clock
from stamps import Stamps, report
from torch import nn

import flatout


class UntilCaptured(flatout.Callback):
    def on_epoch_end(self, state: Any) -> None:
        if any("one compiled graph" in note for note in state.history.notes):
            state.stop_reason = "captured"
        elif any("compute.capture" in note for note in state.history.notes):
            raise RuntimeError(state.history.notes[-1])


def trainer_of(model: nn.Module, say: Callable[[str], None], captured: bool) -> flatout.Trainer:
    return flatout.Trainer(
        model,
        loss="cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=mlp_job.LEARNING_RATE, fused=True),
        allow="exact",
        recipe=flatout.Recipe(
            process={"threads": mlp_job.THREADS}, compute={"capture": "on" if captured else "off"}
        ),
        say=say,
    )


def main() -> None:
    arguments = mlp_job.arguments("--captured")
    if not arguments.captured:
        # Every restart decides for itself, as on a machine that has never seen the job.
        os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    inputs, labels = mlp_torch.tensors(arguments.samples)
    if arguments.captured:
        trainer_of(mlp_torch.model(), lambda line: None, True).fit(
            (inputs, labels),
            batch_size=mlp_job.BATCH,
            epochs=1_000_000,
            callbacks=[UntilCaptured()],
            progress=False,
        )
    model = mlp_torch.model()
    stamps = Stamps()
    decisions: list[str] = []
    trainer_of(model, decisions.append, arguments.captured).fit(
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
