"""The hardware of this machine for a training job. Uses neither torch nor a device context."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flatout.devices.cpus import Cpus, read_cpus
from flatout.devices.gpus import Gpu, Nvml, read_nvml
from flatout.devices.memory import Memory, Shm, read_memory, read_shm
from flatout.devices.torch_build import TorchBuild, driver_fits, read_torch_build
from flatout.devices.visible import cuda_devices, order_is_certain


@dataclass(frozen=True)
class Inventory:
    """The hardware of this machine, as this process may use it.

    Args:
        nvml: the GPUs of the machine, including hidden ones, and the driver.
        cuda: the devices that CUDA shows, in its order: `cuda[1]` is `cuda:1`.
        cuda_order_certain: whether that order is known, or is a guess of CUDA's own guess.
        torch: the build of the installed torch.
    """

    cpus: Cpus
    memory: Memory
    shm: Shm | None
    nvml: Nvml
    cuda: tuple[Gpu, ...]
    cuda_order_certain: bool
    torch: TorchBuild

    @property
    def driver_fits_torch(self) -> bool | None:
        """True if the driver runs this torch's CUDA, or None if one of them has no CUDA."""
        if self.torch.cuda is None or self.nvml.cuda is None:
            return None
        return driver_fits(self.torch.cuda, self.nvml.cuda)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON. Sizes are in bytes."""
        numbers = {device.uuid: index for index, device in enumerate(self.cuda)}
        gpus = [{**asdict(gpu), "cuda_index": numbers.get(gpu.uuid)} for gpu in self.nvml.gpus]
        return {
            "cpus": asdict(self.cpus),
            "memory": asdict(self.memory),
            "shm": asdict(self.shm) if self.shm else None,
            "gpus": gpus,
            "cuda_order_certain": self.cuda_order_certain,
            "driver": {
                "version": self.nvml.driver,
                "cuda": self.nvml.cuda,
                "problem": self.nvml.problem,
                "fits_torch": self.driver_fits_torch,
            },
            "torch": asdict(self.torch),
        }


def inventory(root: Path = Path("/")) -> Inventory:
    """Return the hardware of this machine. Takes some milliseconds.

    Args:
        root: the folder that holds `proc` and `sys`; only tests use another one than "/".
    """
    nvml = read_nvml()
    return Inventory(
        cpus=read_cpus(root),
        memory=read_memory(root),
        shm=read_shm(),
        nvml=nvml,
        cuda=tuple(cuda_devices(nvml.gpus, os.environ)),
        cuda_order_certain=order_is_certain(nvml.gpus, os.environ),
        torch=read_torch_build(),
    )
