"""The GPUs that CUDA will show to this process, with their numbers, without asking CUDA.

The rules are those of the CUDA programming guide (environment variables CUDA_VISIBLE_DEVICES and
CUDA_DEVICE_ORDER). Cases that the guide leaves open (numbers followed by text, names given twice)
follow torch.cuda.device_count. A slice of a GPU (MIG) counts as the first GPU, because a process
gets one slice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from flatout.devices.gpus import Gpu


def cuda_devices(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    ordered = _ordered(gpus, environment)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return ordered
    if wanted.startswith("MIG-"):
        return ordered[:1]
    return _by_name(wanted, ordered) if wanted.startswith("GPU-") else _by_number(wanted, ordered)


def order_is_certain(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> bool:
    """Return whether CUDA's numbers are known without asking CUDA.

    The default order, FASTEST_FIRST, is the driver's own guess; with GPUs of one model it is that
    of the bus.
    """
    return _by_bus(environment) or len({gpu.name for gpu in gpus}) <= 1


def _ordered(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    if _by_bus(environment):
        return list(gpus)
    # stable: equal GPUs stay in the order of the bus
    return sorted(gpus, key=lambda gpu: -gpu.speed)


def _by_bus(environment: Mapping[str, str]) -> bool:
    return environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _by_number(wanted: str, ordered: Sequence[Gpu]) -> list[Gpu]:
    chosen: dict[int, Gpu] = {}
    for entry in wanted.split(","):
        number = re.match(r"[+-]?\d+", entry.strip())
        index = int(number[0]) if number else -1
        if index in chosen:
            return []
        if not 0 <= index < len(ordered):
            break  # an entry that names nothing hides the entries after it
        chosen[index] = ordered[index]
    return list(chosen.values())


def _by_name(wanted: str, ordered: Sequence[Gpu]) -> list[Gpu]:
    chosen: dict[str, Gpu] = {}
    for entry in wanted.split(","):
        # The begin of a name is enough if only one GPU's name begins so.
        named = [gpu for gpu in ordered if entry[:4] == "GPU-" and gpu.uuid.startswith(entry)]
        if len(named) != 1:
            break
        if named[0].uuid in chosen:
            return []
        chosen[named[0].uuid] = named[0]
    return list(chosen.values())
