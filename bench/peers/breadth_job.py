"""One job of bench/breadth.py: a family of models, trained by hand or by a Trainer.

With `--turns IN OUT` it trains an epoch each time that a byte comes from the file descriptor IN,
and says so by a byte to OUT: jobs that take turns meet the same moments of a machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from breadth_models import FAMILIES, Family

import flatout

# Batches that are kept in memory; epochs go through them again.
BATCHES, WARM_UP = 24, 3


def data_of(family: Family, batches: int = BATCHES) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(1)
    x = family.inputs(batches * family.batch)
    return x, family.targets(x)


def part_of(values: Any, index: torch.Tensor) -> Any:
    if isinstance(values, dict):
        return {name: value[index] for name, value in values.items()}
    return values[index]


class Turns(flatout.Callback):
    """Waits for its turn before each epoch.

    Args:
        ends: the file descriptors to read of and to write to; none where no other job runs.

    Attributes:
        waited_s: seconds that it has waited.
    """

    def __init__(self, ends: list[int]) -> None:
        self._ends = ends
        self.waited_s = 0.0
        self.wait()

    def wait(self) -> None:
        if not self._ends:
            return
        began = time.perf_counter()
        os.write(self._ends[1], b".")
        os.read(self._ends[0], 1)
        self.waited_s += time.perf_counter() - began

    def on_epoch_end(self, state: flatout.FitState) -> None:
        self.wait()


def by_hand(
    family: Family, arm: set[str], seed: int, seconds: float, steps: int, ends: list[int]
) -> dict[str, Any]:
    """The median seconds of a step of a loop that an expert writes, of all steps, and the loss."""
    x, y = data_of(family)
    torch.manual_seed(seed)
    model = family.model()
    if "channels_last" in arm:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused="fused" in arm)
    run: Any = torch.compile(model) if "compile" in arm else model
    times: list[float] = []
    losses: list[float] = []
    turns = Turns(ends)
    started, waited = time.perf_counter(), turns.waited_s
    setup = 0.0
    while len(losses) < steps or (not steps and sum(times) < seconds):
        for index in torch.randperm(len(y)).split(family.batch):
            began = time.perf_counter()
            inputs, targets = part_of(x, index), y[index]
            if "channels_last" in arm:
                inputs = inputs.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            half = "bf16" in arm
            with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
                output = run(**inputs) if isinstance(inputs, dict) else run(inputs)
                loss = family.loss(output.float() if half else output, targets)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if len(losses) == WARM_UP:
                setup = time.perf_counter() - started
            elif len(losses) > WARM_UP:
                times.append(time.perf_counter() - began)
            if (steps and len(losses) >= steps) or (not steps and sum(times) >= seconds):
                break
        turns.wait()
    return {
        "fit_s": time.perf_counter() - started - (turns.waited_s - waited),
        "last_s": median(times[-max(1, len(times) // 3) :]),
        "step_s": median(times),
        "setup_s": setup if "compile" in arm else 0.0,
        "loss": sum(losses[-BATCHES:]) / len(losses[-BATCHES:]),
    }


def by_default(family: Family, seed: int, steps: int, ends: list[int]) -> dict[str, Any]:
    """What a Trainer with nothing set takes for about so many steps."""
    x, y = data_of(family)
    torch.manual_seed(seed)
    model = family.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = flatout.Trainer(model, loss=family.loss, optimizer=optimizer, say=lambda line: None)
    turns = Turns(ends)
    began, waited = time.perf_counter(), turns.waited_s
    history = trainer.fit(
        x,
        y,
        batch_size=family.batch,
        epochs=max(1, round(steps / BATCHES)),
        progress=False,
        callbacks=[turns] if ends else [],
    )
    seconds = time.perf_counter() - began - (turns.waited_s - waited)
    times = history.step_times
    tuning = history.tuning or {"lost_s": 0.0}
    assert history.recipe is not None
    chosen = {change.field: change.value for change in history.recipe.changes()}
    return {
        "fit_s": seconds,
        "steps": history.timeline.steps,
        "last_s": float(median(times[-max(1, len(times) // 3) :])),
        "loss": history.epochs[-1]["loss"],
        "chosen": chosen,
        "words": history.recipe.summary(),
        "before_s": float(history.timeline.rows()[0, 0]) / 1e9 - began,  # all of it: loading, too
        "lost_s": tuning["lost_s"],
        "tuning": history.tuning,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", choices=list(FAMILIES), required=True)
    parser.add_argument("--arm", required=True, help="default, fp32, or parts joined by +")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=int, nargs=2, default=[], metavar=("IN", "OUT"))
    a = parser.parse_args()
    family = FAMILIES[a.family]
    if a.arm == "default":
        found = by_default(family, a.seed, a.steps, a.turns)
    else:
        found = by_hand(family, set(a.arm.split("+")), a.seed, a.seconds, a.steps, a.turns)
    a.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
