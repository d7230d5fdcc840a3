"""Trains a small model and saves it: small_job.py OUT [--pause 0.1] [--run FOLDER] [--fail 3]

    --pause S       after each step, whose number is in the file `step`, until there is `hurry`
    --run FOLDER    the run folder, from whose checkpoint it goes on
    --fail STEP     raises an error behind that step, in the last rank alone

Prints which rank it is.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch

import flatout
from flatout.world import place


class Slow(flatout.Callback):
    every = 1

    def __init__(self, pause, fail):
        self.pause, self.fail = pause, fail

    def on_step(self, state):
        Path("step").write_text(str(state.step))
        if not Path("hurry").exists():
            time.sleep(self.pause)
        if state.step == self.fail and place().rank == place().world_size - 1:
            raise ValueError(f"no good at step {state.step}")


parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--run")
parser.add_argument("--fail", type=int)
asked = parser.parse_args()

rng = np.random.default_rng(1)
x = rng.normal(size=(200, 20)).astype(np.float32)
y = rng.integers(0, 5, 200)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
trainer = flatout.Trainer(model, lr=0.01, allow="exact", run=asked.run)
callbacks = [Slow(asked.pause, asked.fail)]
trainer.fit((x, y), batch_size=10, epochs=2, callbacks=callbacks, resume=asked.run is not None)
trainer.save(asked.out)
# In one write, so that lines of several ranks do not mix.
print(f"{trainer.world()} {os.environ.get('GLOO_SOCKET_IFNAME')}\n", end="", flush=True)
