"""DeepFM on two ranks, on one host or two: tables on both, sharded over them, or torch's DDP.

Clock stamps lie within one epoch, so that they are of steps alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

import click_job
import ddp_job
import torch
import torch.distributed as dist
from stamps import Stamps, report
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import flatout

DDP = "ddp"


class Clock(flatout.Callback):
    """Marks every so many steps."""

    def __init__(self, stamps: Stamps, steps: int) -> None:
        self.stamps, self.every = stamps, steps

    def on_step(self, state: object) -> None:
        self.stamps.mark()


def by_flatout(
    arguments: argparse.Namespace, train: click_job.Clicks, model: torch.nn.Module, stamps: Stamps
) -> tuple[bool, str]:
    said: list[str] = []
    trainer = flatout.Trainer(
        model,
        loss="binary_cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=click_job.LEARNING_RATE),
        allow="exact",
        recipe=flatout.Recipe(
            compute={"touched_rows": "on"},
            process={"threads": arguments.threads},
            world={"tables": arguments.tables},
        ),
        say=said.append,
    )
    trainer.fit(
        (torch.from_numpy(train.ids), torch.from_numpy(train.clicks)),
        batch_size=arguments.batch,
        epochs=1,
        callbacks=[Clock(stamps, arguments.steps)],
        progress=False,
    )
    return trainer.world().is_first, "; ".join(said)


def by_ddp(
    arguments: argparse.Namespace, train: click_job.Clicks, model: torch.nn.Module, stamps: Stamps
) -> tuple[bool, str]:
    """A dense Adam."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=click_job.LEARNING_RATE, fused=True)
    ids, clicks = torch.from_numpy(train.ids), torch.from_numpy(train.clicks)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    for number, places in enumerate(order.split(arguments.batch), 1):
        own = places.chunk(size)[rank]
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(wrapped(ids[own]), clicks[own]).backward()
        optimizer.step()
        if number % arguments.steps == 0:
            stamps.mark()
    return rank == 0, ""


def main() -> None:
    parser = click_job.parser()
    parser.add_argument("--tables", choices=["replicated", "sharded", DDP], required=True)
    arguments = parser.parse_args()
    os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    torch.set_num_threads(arguments.threads)
    steps = arguments.steps
    arguments.steps *= arguments.warm_up + arguments.epochs
    train, held_out = click_job.of(arguments)
    arguments.steps = steps
    model = click_job.model(arguments)
    stamps = Stamps()
    run = by_ddp if arguments.tables == DDP else by_flatout
    is_first, note = run(arguments, train, model, stamps)
    stamps.readings = stamps.readings[-1 - arguments.epochs :]
    if is_first:
        auc = click_job.auc_of(model, held_out)
        report(arguments.out, stamps, steps=steps, accuracy=auc, note=note)


if __name__ == "__main__":
    if ddp_job.is_rank():
        main()
    else:
        sys.exit(ddp_job.start_ranks())
