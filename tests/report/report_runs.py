"""Run folders as runs leave them, made up, so that their truth is known."""

from __future__ import annotations

import json

import numpy as np

from flatout.measure import LANES
from made_up_profiles import NOW, made_up

LANES_MS = dict.fromkeys(LANES, 0.0) | {"input": 2.0, "forward": 12.0, "backward": 20.0, "sync": 6}


def profile(folder="runs/a", *, ms=40.0, seed=0, steps=400, lanes=LANES_MS, **changes):
    """A Profile of a run whose steps take so many milliseconds, with 2% of noise."""
    drawn = ms * np.random.default_rng(seed).lognormal(0, 0.02, steps)
    fields = {
        "rank": {
            "lanes_ms": dict(lanes),
            "quantiles_ms": {lane: [lanes[lane]] * 5 for lane in LANES[:7]},
        },
        "job": {"loss": "cross_entropy", "metrics": "accuracy", "optimizer 1": "Adam(lr=0.001)"},
        "recipe": {
            "summary": "bf16",
            "values": {"compute.precision": "bf16", "world.reduction": "shared"},
            "reasons": {"compute.precision": "measured"},
            "measured": {"compute.precision": "1.50x [1.45,1.55] (A/A ±1.0%)"},
        },
        "epochs": [epoch(1, 0.9, 0.8), epoch(2, 0.5, 0.7)],
        "notes": ["auto: bf16: 1.50x faster than plain"],
    }
    return made_up(folder, drawn, **(fields | changes))


def epoch(number, loss, val_loss):
    """The figures of an epoch."""
    at = {"epoch": number, "step": 200 * number, "samples": 12_800 * number, "at_s": 8.0 * number}
    return {**at, "loss": loss, "val_loss": val_loss, "accuracy": 1 - loss / 2, "seconds": 8.0}


def make_run(folder, made=None, *, log=True, ended=True, **given):
    """Write a run folder; returns it.

    Args:
        folder: of the run.
        made: its Profile; None makes one of `given`.
        log: whether there is one.
        ended: whether the run has come to its end.
        given: as `profile` takes it.
    """
    folder.mkdir(parents=True)
    found = profile(folder, **given) if made is None else made
    found.write(folder)
    line = {"event": "began", "id": "1", "time": NOW, "host": "elsewhere", "pid": 1}
    lines = [line]
    if ended:
        figures = found.epochs[-1] if found.epochs else {}
        lines.append(
            {
                "event": "ended",
                "id": "1",
                "time": NOW + 60,
                "state": found.state,
                "steps": found.steps.last,
                "samples_per_s": 1600.0,
                "figures": figures,
            }
        )
    write_lines(folder / "runs.jsonl", lines)
    if log:
        rows = [
            {
                "kind": "step",
                "step": step,
                "epoch": 1 + (step > 200),
                "loss": 1 / (1 + step / 100),
                "samples_per_s": 1600.0,
                "time": NOW + 3 + step * 0.04,
            }
            for step in range(50, 401, 50)
        ]
        rows += [
            {"kind": "epoch", **one, "time": NOW + 3 + 8 * one["epoch"]} for one in found.epochs
        ]
        write_lines(folder / "log.jsonl", sorted(rows, key=lambda row: row["time"]))
    return folder


def write_lines(path, lines):
    """A file of JSON lines."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
