"""A small training that runs alone or as ranks which share a device.

gpu_ranks.py FOLDER DEVICE JSON: the JSON says how, see `train`. The first rank writes what came of
it into FOLDER.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import flatout
from flatout.world import place, restarts

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.003),
    "fused": lambda p: torch.optim.Adam(p, 0.003, fused=True),
}


def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(90, 8, generator=draw)
    return x, 2 * x[:, :1] + 0.1 * torch.randn(90, 1, generator=draw)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(),
        nn.Linear(16, 1),
    )  # fmt: skip


class Kills(flatout.Callback):
    """Ends the last rank at a step, once."""

    every = 1

    def __init__(self, step):
        self.step = step

    def on_step(self, state):
        is_last = place().rank == place().world_size - 1
        if state.step == self.step and is_last and not restarts():
            os.kill(os.getpid(), signal.SIGKILL)


def train(device, *, world=None, optimizer="adam", epochs=2, run=None, kills=0, again=False):
    """What came of a training: the weights by name, and what is told of it.

    Args:
        device: on which each rank computes.
        world: settings of that section.
        optimizer: one of OPTIMIZERS.
        epochs: in all.
        run: folder, from whose checkpoint it goes on.
        kills: the step at which the last rank is killed; 0 for none.
        again: whether another fit follows, whose optimizer goes on.
    """
    model, said = net(), []
    trainer = flatout.Trainer(
        model,
        loss="mse",
        optimizer=OPTIMIZERS[optimizer](model.parameters()),
        allow="learning",
        clip_norm=1.0,
        recipe=flatout.Recipe(
            world={"device": device, **(world or {})},
            compute={"precision": "fp32", "fused_optimizer": "off"},
        ),
        run=run,
        say=said.append,
    )
    given = {"batch_size": 24, "shuffle": False, "progress": False}
    history = trainer.fit(
        data(), **given, epochs=epochs, validation_data=data(), resume=run is not None,
        callbacks=[Kills(kills)] if kills else [],
    )  # fmt: skip
    if again:
        history = trainer.fit(data(), **given, epochs=1)
    told = {
        "loss": history.epochs[-1]["loss"],
        "said": said,
        "device": str(trainer.loop.device),
        "ranks": trainer.loop.world.size,
        "on": sorted({str(p.device) for p in model.parameters()}),
    }
    return {name: value.cpu() for name, value in model.state_dict().items()}, told


if __name__ == "__main__":
    folder, how = Path(sys.argv[1]), json.loads(sys.argv[3])
    weights, told = train(sys.argv[2], **how)
    if place().rank == 0:
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / "weights")
        (folder / "told.json").write_text(json.dumps(told))
