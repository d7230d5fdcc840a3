"""Flatout's Trainer with a strategy, where nothing else may differ: `allow="exact"`."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import ddp_job
import ddp_torch
import strategies_job
import torch
from flatout_clock import Clock
from stamps import Stamps, report

import flatout


class Facts(flatout.Callback):
    """What the strategy knows while it is there."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_epoch_end(self, state: Any) -> None:
        strategy = state.trainer.loop.stepper.strategy
        if getattr(strategy, "held", None) is not None:
            self.found["held"] = sum(strategy.held)
        if getattr(strategy, "shares", None):
            self.found["shares"] = strategy.shares


def main() -> None:
    arguments = strategies_job.arguments()
    # Every restart decides for itself, as on a machine that has never seen the job.
    os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    inputs, labels = ddp_torch.tensors(arguments.samples)
    model = strategies_job.model()
    recipe: dict[str, Any] = {"process": {"threads": ddp_job.THREADS}}
    if arguments.strategy == "one":
        # The same operators on the same sizes as in stages.
        size = strategies_job.BATCH // strategies_job.MICRO_BATCHES
        recipe["memory"] = {"micro_batch": size}
    else:
        recipe["world"] = {
            "strategy": arguments.strategy,
            "micro_batches": strategies_job.MICRO_BATCHES,
        }
    stamps, facts = Stamps(), Facts()
    trainer = flatout.Trainer(
        model,
        loss="cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=strategies_job.LEARNING_RATE, fused=True),
        allow="exact",
        recipe=flatout.Recipe(**recipe),
        say=lambda line: None,
    )
    trainer.fit(
        (inputs, labels),
        batch_size=strategies_job.BATCH,
        epochs=1 + arguments.epochs,
        callbacks=[Clock(stamps), facts],
        progress=False,
    )
    if trainer.world().is_first:
        steps = len(inputs) // strategies_job.BATCH
        accuracy = ddp_torch.accuracy(model, inputs, labels)
        # Adam has two numbers for each weight, beside its gradient.
        whole = 4 * sum(parameter.nbytes for parameter in model.parameters())
        note = strategies_job.as_note(whole=whole, **facts.found)
        report(arguments.out, stamps, steps=steps, accuracy=accuracy, note=note)
    trainer.world().wait()


def run_twice() -> int:
    """Run the job of one rank twice at once, of which the first one reports; the exit code."""
    words = ["one" if word == "beside" else word for word in sys.argv]
    out = words.index("--out") + 1
    second = [*words[:out], f"{words[out]}.beside", *words[out + 1 :]]
    both = [subprocess.Popen([sys.executable, *own]) for own in (words, second)]
    return max(abs(one.wait()) for one in both)


if __name__ == "__main__":
    asked = strategies_job.arguments().strategy
    if ddp_job.is_rank() or asked == "one":
        main()
    elif asked == "beside":
        sys.exit(run_twice())
    else:
        sys.exit(ddp_job.start_ranks())
