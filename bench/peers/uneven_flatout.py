"""Four ranks, one of them three times slower, until a held-out loss is reached.

What a rank computes is made longer by sleeping, as if an accelerator computed it: a machine of few
cores then has room for all four.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import ddp_job
import torch
from torch import nn

import flatout
from flatout.world import place

RANKS, SLOWED = 4, 3
PACE_S = 0.02  # of a part of a batch
BATCH, RATE, TARGET, MOST_EPOCHS = 64, 0.2, 0.3, 30
WAYS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"staleness": "unbounded"},
    "spare": {"spare_workers": 1},
}


class Reaches(flatout.Callback):
    """Ends the training where the held-out loss is reached, and notes when it was."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before = (0.0, float("inf"))

    def on_fit_start(self, state: Any) -> None:
        self.began = time.perf_counter()

    def on_epoch_end(self, state: Any) -> None:
        now, loss = time.perf_counter() - self.began, state.logs["val_loss"]
        if loss <= TARGET:
            before, above = self._before
            share = 1.0 if above == float("inf") else (above - TARGET) / (above - loss)
            self.seconds = before + share * (now - before)
            state.stop("the loss is reached")
        self._before = now, loss


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--way", choices=WAYS, default="sync")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    torch.set_num_threads(1)
    train, held_out = flatout.data.digits(size=8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    pace_s = PACE_S * (SLOWED if place().rank == RANKS - 1 else 1)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if outputs.requires_grad:
            time.sleep(pace_s)
        return nn.functional.cross_entropy(outputs, targets)

    # Where each part of a batch is a step of its own, they share the rate out.
    rate = RATE / RANKS if asked.way == "async" else RATE
    reaches = Reaches()
    trainer = flatout.Trainer(
        model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        allow="exact",
        recipe=flatout.Recipe(world={"strategy": "parameter_server", **WAYS[asked.way]}),
        say=lambda line: None,
    )
    history = trainer.fit(
        train,
        validation_data=held_out,
        batch_size=BATCH,
        epochs=MOST_EPOCHS,
        callbacks=[reaches],
        progress=False,
    )
    if not reaches.seconds:
        sys.exit(f"the loss stays at {history.epochs[-1]['val_loss']:.3f}, wanted {TARGET}")
    if trainer.world().is_first:
        note = {
            "epochs": len(history.epochs),
            "staleness": history.staleness and history.staleness["mean"],
            "late": history.late,
        }
        found = {"epoch_seconds": [reaches.seconds], "steps": 1, "note": json.dumps(note)}
        asked.out.write_text(json.dumps(found))
    trainer.world().wait()


if __name__ == "__main__":
    if ddp_job.is_rank():
        main()
    else:
        sys.exit(ddp_job.start_ranks(RANKS))
