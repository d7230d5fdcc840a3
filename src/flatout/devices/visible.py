"""Which GPUs CUDA will show to this process, and by which number, without asking CUDA.

The rules are those of the CUDA programming guide (environment variables CUDA_VISIBLE_DEVICES and
CUDA_DEVICE_ORDER) and of the MIG user guide (device enumeration); for what the guide leaves open
(numbers with text behind them, names given twice) they are those that torch.cuda.device_count uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flatout.devices.gpus import Gpu, MigDevice


class CudaDevice(NamedTuple):
    """What CUDA calls a device: a GPU, or a slice of one. Its number is its place in the list."""

    gpu: Gpu
    mig: MigDevice | None

    @property
    def uuid(self) -> str:
        return self.mig.uuid if self.mig else self.gpu.uuid


def cuda_devices(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[CudaDevice]:
    ordered = _ordered(gpus, environment)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        chosen = [device for gpu in ordered if (device := _device(gpu))]
    elif wanted.startswith(("GPU-", "MIG-")):
        chosen = _by_name(wanted, ordered)
    else:
        chosen = _by_number(wanted, ordered)
    # One process gets one slice, and no whole GPU beside it.
    slices = [device for device in chosen if device.mig]
    return slices[:1] or chosen


def order_is_certain(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> bool:
    """Whether CUDA's numbers are known without asking CUDA.

    The default order, FASTEST_FIRST, is the driver's own guess; with GPUs of one model it is that
    of the bus.
    """
    return _by_bus(environment) or len({gpu.name for gpu in gpus}) <= 1


def _ordered(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    if _by_bus(environment):
        return list(gpus)
    return sorted(gpus, key=lambda gpu: -gpu.speed)  # stable: equals stay in the bus' order


def _by_bus(environment: Mapping[str, str]) -> bool:
    return environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _device(gpu: Gpu) -> CudaDevice | None:
    if not gpu.mig_enabled:
        return CudaDevice(gpu, None)
    return CudaDevice(gpu, gpu.mig[0]) if gpu.mig else None


def _by_number(wanted: str, ordered: Sequence[Gpu]) -> list[CudaDevice]:
    chosen: dict[int, CudaDevice] = {}
    for entry in wanted.split(","):
        number = re.match(r"[+-]?\d+", entry.strip())
        index = int(number[0]) if number else -1
        if index in chosen:
            return []
        if not 0 <= index < len(ordered) or (device := _device(ordered[index])) is None:
            break  # an entry that names nothing hides the ones after it
        chosen[index] = device
    return list(chosen.values())


def _by_name(wanted: str, ordered: Sequence[Gpu]) -> list[CudaDevice]:
    known = {gpu.uuid: _device(gpu) for gpu in ordered}
    known |= {mig.uuid: CudaDevice(gpu, mig) for gpu in ordered for mig in gpu.mig}
    chosen: dict[str, CudaDevice] = {}
    for entry in wanted.split(","):
        # The start of a name will do, if only one device's name starts so.
        names = [uuid for uuid in known if entry[:4] == wanted[:4] and uuid.startswith(entry)]
        device = known[names[0]] if len(names) == 1 else None
        if device is None:
            break
        if device.uuid in chosen:
            return []
        chosen[device.uuid] = device
    return list(chosen.values())
