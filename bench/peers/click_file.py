"""Which share of a step waits for input, where DeepFM trains from LibSVM text on two cores."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

CORES = 2
if hasattr(os, "sched_setaffinity"):  # before torch counts them
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])

import click_job  # noqa: E402
import torch  # noqa: E402

import flatout  # noqa: E402


class FromText(click_job.DeepFM):
    """As LibSVM gives its inputs: all values are 1."""

    def forward(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)


def write(path: Path, clicks: click_job.Clicks) -> None:
    with path.open("w") as file:
        for click, ids in zip(clicks.clicks.astype(int).tolist(), clicks.ids.tolist(), strict=True):
            file.write(f"{click} {' '.join(f'{id + 1}:1' for id in ids)}\n")


def main() -> None:
    arguments = click_job.parser().parse_args()
    os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    text = arguments.out.parent / "day.svm"
    write(text, click_job.of(arguments)[0])
    torch.set_num_threads(min(CORES, arguments.threads))
    torch.manual_seed(0)
    trainer = flatout.Trainer(
        FromText(arguments.rows + 1, arguments.factors),
        loss="binary_cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=click_job.LEARNING_RATE),
        say=lambda line: None,
    )
    day = flatout.data.libsvm(text, layout="fixed")
    batches = day.shuffle(seed=1).batch(arguments.batch)
    epochs = arguments.warm_up + arguments.epochs
    history = trainer.fit(batches, epochs=epochs, progress=False)
    lanes = history.timeline.rows()[-arguments.epochs * arguments.steps :, 1:]
    share = float(lanes[:, 0].sum() / lanes.sum())
    step_ms = float(lanes.sum() / len(lanes) / 1e6)
    arguments.out.write_text(json.dumps({"share": share, "step_ms": step_ms}))


if __name__ == "__main__":
    main()
