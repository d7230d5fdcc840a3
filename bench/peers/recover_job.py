"""A small job on two ranks that writes down when each step was made, on the machine's clock."""

from __future__ import annotations

import os
import time

import numpy as np
import torch

import flatout


class Clock(flatout.Callback):
    every = 1

    def __init__(self) -> None:
        again = os.environ["TORCHELASTIC_RESTART_COUNT"]
        self._file = open(f"steps-{os.environ['RANK']}-{again}", "w", buffering=1)  # noqa: SIM115

    def on_step(self, state: flatout.train.state.FitState) -> None:
        self._file.write(f"{state.step} {time.monotonic()}\n")
        time.sleep(0.005)


def main() -> None:
    random = np.random.default_rng(0)
    inputs = random.standard_normal((20_000, 64), dtype=np.float32)
    labels = random.integers(0, 10, len(inputs))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    recipe = flatout.Recipe(save={"every": 20})
    trainer = flatout.Trainer(model, recipe=recipe, allow="exact", run="run")
    trainer.fit((inputs, labels), batch_size=20, callbacks=[Clock()], progress=False)


if __name__ == "__main__":
    main()
