"""What every peer does alike: a clock stamp after each epoch, and a result file at the end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


class Stamps:
    """Clock readings at the ends of epochs.

    The first epoch is the warm-up (compilation, tuning, cache filling); its end starts the clock.
    """

    def __init__(self) -> None:
        self.readings: list[float] = []

    def mark(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.readings.append(time.perf_counter())

    def epoch_seconds(self) -> list[float]:
        return [
            after - before for before, after in zip(self.readings, self.readings[1:], strict=False)
        ]


def report(out: Path, stamps: Stamps, *, steps: int, accuracy: float, note: str = "") -> None:
    """Write what was measured; `steps` is the number of optimizer steps in an epoch."""
    result = {
        "epoch_seconds": stamps.epoch_seconds(),
        "steps": steps,
        "accuracy": accuracy,
        "note": note,
    }
    out.write_text(json.dumps(result))
