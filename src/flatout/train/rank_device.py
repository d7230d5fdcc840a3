"""The device of this rank: ranks of a node take its GPUs in order."""

from __future__ import annotations

import torch

from flatout.devices import resolve_device
from flatout.errors import DeviceError
from flatout.recipe import World as Asked
from flatout.words import counted
from flatout.world import Place, World, join, place


def device_here(asked: Asked) -> tuple[torch.device, str]:
    """The device, and why it is this one."""
    here, name = place(), asked.device
    if here.local_world_size > 1 and name in ("auto", "cuda"):
        gpus = torch.cuda.device_count()
        if gpus >= here.local_world_size:
            name = f"cuda:{here.local_rank}"
        elif gpus == 1:
            # Some launchers let each rank see its own GPU alone: `join_on` asks whether this is so.
            name = "cuda:0"
        elif gpus or (name == "cuda" and asked.placement == "strict"):
            raise _too_few(here, gpus)
    return resolve_device(name, asked.placement == "strict")


def join_on(asked: Asked) -> World:
    """The World of this process, each of whose ranks has its device."""
    device, _ = device_here(asked)
    here = place()
    if device.type == "cuda" and here.world_size > 1:
        # Random states, streams and what torch.distributed makes are those of the current device.
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
