"""Time steps of DeepFM with small and large tables on one GPU, against loops written by hand.

    python bench/click_gpu.py [--rows 1 10] [--fields-apart] [--json [FILE]]

The job is the job of bench/click.py: 39 fields, 32 factors, layers 128-64-32, skewed ids, batches
of 4,096 in fp32. The samples of the two hand-written loops lie on the device, and no step waits for
it. One loop has a dense fused Adam. The other has sparse gradients with SparseAdam for the tables
and a fused Adam for the rest, and so learns other weights. Flatout is a Trainer with nothing set.
All three run in one process, twice each, in the order A B C C B A. The faster half of the windows
counts.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import click_job
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import flatout
from flatout.recipe import World
from restarts import each, tell
from results import Key, Results, add_json_argument, add_limits, figure, finish, positive

DEFAULT, DENSE, SPARSE = "flatout default", "fused Adam", "SparseAdam"
ARMS = (DENSE, SPARSE, DEFAULT)
MILLION, BATCH, WARM_UP, WINDOWS = 1_000_000, 4096, 2, 3
FACTORS = 32
Data = tuple[torch.Tensor, torch.Tensor]


def now(device: str) -> float:
    """The time when the device has done all that it was asked."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def model_of(rows: int, a: argparse.Namespace, *, sparse: bool = False) -> torch.nn.Module:
    given = argparse.Namespace(rows=rows, factors=a.factors, fields_apart=a.fields_apart)
    with torch.device(a.device):  # a CPU would draw the numbers of large tables for seconds
        return click_job.model(given, sparse=sparse).to(a.device)


def by_hand(arm: str, rows: int, data: Data, a: argparse.Namespace) -> list[float]:
    """Seconds of a step in each window of a pass over the samples."""
    (ids, clicks), sparse = data, arm == SPARSE
    model = model_of(rows, a, sparse=sparse)
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    rest = [p for p in model.parameters() if not sparse or p not in tables]
    optimizers: list[Any] = [torch.optim.Adam(rest, lr=click_job.LEARNING_RATE, fused=True)]
    if sparse:
        optimizers.append(torch.optim.SparseAdam(list(tables), lr=click_job.LEARNING_RATE))
    windows = []
    for _ in range(WARM_UP + WINDOWS):
        start = now(a.device)
        for places in torch.randperm(len(ids), device=ids.device).split(BATCH):
            loss = binary_cross_entropy_with_logits(model(ids[places]), clicks[places])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        windows.append((now(a.device) - start) / a.batches)
    return windows[WARM_UP:]


class Clock(flatout.Callback):
    """The time at the end of each epoch."""

    def __init__(self, device: str) -> None:
        self.device, self.times = device, [now(device)]

    def on_epoch_end(self, state: Any) -> None:
        self.times.append(now(self.device))


def by_flatout(arm: str, rows: int, data: Data, a: argparse.Namespace) -> list[float]:
    """The same of a Trainer, whose first epochs find out what is fast."""
    model = model_of(rows, a)
    trainer = flatout.Trainer(
        model,
        loss="binary_cross_entropy",
        optimizer=torch.optim.Adam(model.parameters(), lr=click_job.LEARNING_RATE),
        recipe=flatout.Recipe(world=World(device=a.device)),
        say=a.said.append,
    )
    clock, epochs = Clock(a.device), a.warm_up + WINDOWS
    history = trainer.fit(*data, batch_size=BATCH, epochs=epochs, callbacks=[clock], progress=False)
    assert history.recipe is not None
    a.words[arm, rows] = history.recipe.summary()
    ends = list(zip(clock.times, clock.times[1:], strict=False))[-WINDOWS:]
    return [(end - start) / a.batches for start, end in ends]


def measure(rows: int, a: argparse.Namespace) -> dict[str, float]:
    """The median seconds of a step of each arm, of the faster half of its windows."""
    made = click_job.made_up(BATCH * a.batches, rows, 1)
    data = torch.from_numpy(made.ids).to(a.device), torch.from_numpy(made.clicks).to(a.device)
    windows: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for arm in (*ARMS, *reversed(ARMS)):
        run: Callable[..., list[float]] = by_flatout if arm == DEFAULT else by_hand
        windows[arm] += run(arm, rows, data, a)
        gc.collect()
        if a.device.startswith("cuda"):
            torch.cuda.empty_cache()
        tell(f"{rows:,} {arm}: {min(windows[arm]) * 1e3:.3f} ms")
    return {arm: median(sorted(own)[: len(own) // 2]) for arm, own in windows.items()}


def keys(sizes: Sequence[int], by_size: dict[int, dict[str, float]]) -> list[Key]:
    def times(rows: int, slower: str) -> float | str:
        return figure(lambda: by_size[rows][slower] / by_size[rows][DEFAULT])

    made = []
    for rows in sizes:
        name = f"{rows // MILLION}m"
        made += [
            Key(f"gpu_{name}_default_vs_fused_adam", times(rows, DENSE)),
            Key(f"gpu_{name}_default_vs_sparse_adam", times(rows, SPARSE)),
        ]
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_argument(parser)
    add_limits(parser)
    parser.add_argument("--check", action="store_true", help="exit 1 if a key is not met")
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 10], help="in millions")
    parser.add_argument("--factors", type=positive, default=FACTORS)
    parser.add_argument("--batches", type=positive, default=40, help="in an epoch")
    parser.add_argument("--fields-apart", action="store_true", help="two tables for each field")
    parser.add_argument("--warm-up", type=positive, default=6, help="Flatout's epochs before")
    parser.add_argument("--device", default="cuda:0", help="cpu tries the bench itself")
    a = parser.parse_args()
    a.said, a.words = [], {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLATOUT_CACHE"] = folder
        sizes = [millions * MILLION for millions in a.rows]
        by_size: dict[int, dict[str, float]] = {}
        each(sizes, lambda rows: by_size.update({rows: measure(rows, a)}))
    made = keys(sizes, by_size)
    name = torch.cuda.get_device_name() if a.device.startswith("cuda") else "a CPU"
    tables = "a table for each field" if a.fields_apart else "all fields in one table"
    results = Results(
        title=f"DeepFM on {name}, {BATCH:,} samples of 39 fields a step, {a.factors} factors, "
        f"{tables}",
        headers=["rows", "", "ms a step", "samples/s", "time / default", "chosen"],
        lines=[
            [
                f"{rows:,}",
                arm,
                f"{1e3 * seconds:.3f}",
                f"{BATCH / seconds:,.0f}",
                f"{seconds / step_s[DEFAULT]:.2f}",
                a.words.get((arm, rows), ""),
            ]
            for rows, step_s in by_size.items()
            for arm, seconds in step_s.items()
        ],
        remarks=list(dict.fromkeys(a.said)),
        keys=made,
        data={"rows": {str(rows): step_s for rows, step_s in by_size.items()}},
    )
    return finish(results, a)


if __name__ == "__main__":
    sys.exit(main())
