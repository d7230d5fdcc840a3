"""The device of this rank: the ranks of a node use its GPUs in order."""

from __future__ import annotations

import torch

from flatout.devices import resolve_device
from flatout.errors import DeviceError
from flatout.recipe import World as Asked
from flatout.words import counted
from flatout.world import Place, World, join, place


def device_here(asked: Asked) -> tuple[torch.device, str]:
    """Return this rank's device, and the reason for it."""
    here, name = place(), asked.device
    if here.local_world_size > 1 and name in ("auto", "cuda"):
        gpus = torch.cuda.device_count()
        if gpus >= here.local_world_size:
            name = f"cuda:{here.local_rank}"
        elif gpus == 1:
            # Some launchers show each rank only its own GPU: `join_on` checks for shared GPUs.
            name = "cuda:0"
        elif gpus or (name == "cuda" and asked.placement == "strict"):
            raise _too_few(here, gpus)
    return resolve_device(name, asked.placement == "strict")


def join_on(asked: Asked) -> World:
    """Join the ranks, each with its device, and return the World of this process."""
    device, _ = device_here(asked)
    here = place()
    if device.type == "cuda" and here.world_size > 1:
        # Set it as the current device, which random states, streams and torch.distributed's objects
        # use.
        torch.cuda.set_device(device)
    world = join(str(device), asked.timeout, asked.patience)
    if world.shares_gpus and asked.device in ("auto", "cuda"):
        raise _too_few(here, torch.cuda.device_count())
    return world


def _too_few(here: Place, gpus: int) -> DeviceError:
    return DeviceError(
        f"{here.local_world_size} ranks on this node, but {counted(gpus, 'GPU')}",
        do="start as many ranks as there are GPUs, or --set world.device=cpu; world.device=cuda:0 "
        "lets ranks share the first GPU, which is slower than one rank",
    )
