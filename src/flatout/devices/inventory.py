"""What this machine has for a training job. Neither torch nor a device context is touched."""

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
    """What this machine has, as this process may use it.

    Args:
        nvml: the GPUs of the machine, hidden ones too, and the driver.
        cuda: the devices that CUDA shows, in its order: `cuda[1]` is `cuda:1`.
        cuda_order_certain: whether that order is known, or CUDA's guess was guessed.
        torch: what the installed torch was built for.
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
        """Whether the driver runs this torch's CUDA; None where one of them has none."""
        if self.torch.cuda is None or self.nvml.cuda is None:
            return None
        return driver_fits(self.torch.cuda, self.nvml.cuda)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON. Sizes are in bytes."""
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
    """Returns what this machine has. Takes some milliseconds.

    Args:
        root: the folder that holds `proc` and `sys`; only tests give another than "/".
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
