"""One arm of bench/evaluation.py: passes of a family's model over the same samples."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from breadth_job import data_of
from breadth_models import FAMILIES, Family

import flatout

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def by_hand(family: Family, model: torch.nn.Module, mode: Any, verb: str, x: Any, y: Any) -> float:
    """The mean loss, or the sum of all outputs, of a loop that one writes."""
    model.eval()
    total, outputs = 0.0, []
    with mode():
        for inputs, targets in zip(x.split(family.batch), y.split(family.batch), strict=True):
            output = model(inputs)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", choices=list(FAMILIES), required=True)
    parser.add_argument("--verb", choices=("evaluate", "predict"), required=True)
    parser.add_argument("--arm", choices=[*MODES, "flatout"], required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batches", type=int, required=True)
    a = parser.parse_args()
    family = FAMILIES[a.family]
    x, y = data_of(family, a.batches)
    torch.manual_seed(0)
    model, size = family.model(), family.batch
    if a.arm != "flatout":
        mode = MODES[a.arm]
        found = timed(lambda: by_hand(family, model, mode, a.verb, x, y), a.seconds)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        trainer = flatout.Trainer(
            model, loss=family.loss, optimizer=optimizer, say=lambda line: None
        )
        found = timed(lambda: by_trainer(family, trainer, a.verb, x, y), a.seconds)
        won = [trial["b"] for trial in trainer.loop.evaluate_batch.trials if trial["chosen"] == "b"]
        size = won[-1] if won else size
    a.out.write_text(json.dumps({**found, "size": size}))


if __name__ == "__main__":
    main()
