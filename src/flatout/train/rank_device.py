"""The device of this rank: ranks of a node take its GPUs in order."""

from __future__ import annotations

import torch

from flatout.devices import resolve_device
from flatout.errors import DeviceError
from flatout.recipe import World
from flatout.world.place import place


def device_here(asked: World) -> tuple[torch.device, str]:
    """The device, and why it is this one.

    Args:
        asked: the section of the Recipe.

    Raises:
        DeviceError: it is not here, and was asked for strictly.
    """
    here, name = place(), asked.device
    if here.local_world_size > 1 and name in ("auto", "cuda"):
        found = torch.cuda.device_count()
        if found >= here.local_world_size:
            name = f"cuda:{here.local_rank}"
        elif found or (name == "cuda" and asked.placement == "strict"):
            raise DeviceError(
                f"{here.local_world_size} ranks on this node, but {found} GPUs",
                do="start as many ranks as there are GPUs, or --set world.device=cpu",
            )
    return resolve_device(name, asked.placement == "strict")
