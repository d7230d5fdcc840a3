"""The same model and loop in Flatout's Trainer; where nothing else is said `auto` decides."""

from __future__ import annotations

import os
from functools import partial

import click_job
import torch
from flatout_clock import Clock
from stamps import Stamps, report

import flatout


def main() -> None:
    parser = click_job.parser()
    parser.add_argument("--set", nargs="*", default=(), metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    # Every restart decides for itself, as on a machine that has never seen the job.
    os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    torch.set_num_threads(arguments.threads)
    train, held_out = click_job.of(arguments)
    model = click_job.model(arguments)
    stamps = Stamps()
    decisions: list[str] = []
    recipe = flatout.Recipe().replace(dict(one.split("=", 1) for one in arguments.set))
    trainer = flatout.Trainer(
        model,
        loss="binary_cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=click_job.LEARNING_RATE),
        recipe=recipe,
        say=decisions.append,
    )
    trainer.fit(
        (torch.from_numpy(train.ids), torch.from_numpy(train.clicks)),
        batch_size=arguments.batch,
        epochs=arguments.warm_up + arguments.epochs,
        callbacks=[Clock(stamps)],
        progress=False,
    )
    stamps.readings = stamps.readings[-1 - arguments.epochs :]
    auc = click_job.auc_of(model, held_out)
    steps = arguments.steps
    report(arguments.out, stamps, steps=steps, accuracy=auc, note="; ".join(decisions))


if __name__ == "__main__":
    main()
