"""One arm of bench/evaluation.py: passes of a family's model over the same samples."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from breadth_job import data_of, part_of
from breadth_models import FAMILIES, Family

import flatout

MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "compile": torch.inference_mode,
}
# The forward is compiled and measured by then, or will not be.
LONGEST_S = 300.0


def by_hand(family: Family, model: Any, mode: Any, verb: str, x: Any, y: Any) -> float:
    """The mean loss, or the sum of all outputs, of a loop that one writes."""
    total, outputs = 0.0, []
    with mode():
        for at in range(0, len(y), family.batch):
            index = slice(at, at + family.batch)
            inputs, targets = part_of(x, index), y[index]
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            if verb == "evaluate":
                total += float(family.loss(output, targets)) * len(targets)
            else:
                outputs.append(output)
    return total / len(y) if verb == "evaluate" else float(torch.cat(outputs).double().sum())


def by_trainer(family: Family, trainer: flatout.Trainer, verb: str, x: Any, y: Any) -> float:
    """The same of a Trainer."""
    if verb == "evaluate":
        return float(trainer.evaluate(x, y, batch_size=family.batch)["loss"])
    return float(trainer.predict(x, batch_size=family.batch).double().sum())


def timed(run: Callable[[], float], seconds: float) -> dict[str, Any]:
    value, times = run(), []
    while sum(times) < seconds:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return {"pass_s": median(times), "passes": len(times), "value": value}


def graph_of(trainer: flatout.Trainer) -> dict[str, Any]:
    """What came of compiling the forward, by the batches that took longest."""
    graphs = trainer.loop.evaluation.graph.records()
    return max(graphs, key=lambda one: ("ratio" in one, one["seconds"]), default={})


def until_compiled(trainer: flatout.Trainer, run: Callable[[], float]) -> None:
    """Make passes until the graph is measured, or cannot be."""
    ends = time.monotonic() + LONGEST_S
    while time.monotonic() < ends:
        run()
        if not all(one["is_open"] for one in trainer.loop.evaluation.graph.records()):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", choices=list(FAMILIES), required=True)
    parser.add_argument("--verb", choices=("evaluate", "predict"), required=True)
    parser.add_argument("--arm", choices=[*MODES, "flatout", "long"], required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batches", type=int, required=True)
    a = parser.parse_args()
    os.environ["FLATOUT_CACHE"] = str(Path("cache").absolute())  # of this process alone
    family = FAMILIES[a.family]
    x, y = data_of(family, a.batches)
    torch.manual_seed(0)
    model, size, compile_s, graph = family.model(), family.batch, 0.0, {}
    if a.arm in MODES:
        mode, called = MODES[a.arm], model.eval()
        if a.arm == "compile":
            called, began = torch.compile(model), time.perf_counter()
            by_hand(family, called, mode, a.verb, x, y)
            compile_s = time.perf_counter() - began
        found = timed(lambda: by_hand(family, called, mode, a.verb, x, y), a.seconds)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        recipe = flatout.Recipe(compute={"capture": "on" if a.arm == "long" else "auto"})
        trainer = flatout.Trainer(
            model, loss=family.loss, optimizer=optimizer, recipe=recipe, say=lambda line: None
        )
        run = lambda: by_trainer(family, trainer, a.verb, x, y)  # noqa: E731
        if a.arm == "long":
            until_compiled(trainer, run)
        found = timed(run, a.seconds)
        graph = graph_of(trainer)
        won = [
            trial["b"]
            for trial in trainer.loop.evaluation.batch_size.trials
            if trial["chosen"] == "b"
        ]
        size = won[-1] if won else size
    a.out.write_text(json.dumps({**found, "size": size, "compile_s": compile_s, "graph": graph}))


if __name__ == "__main__":
    main()
