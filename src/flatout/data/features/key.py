"""Key of stored features, from weights, precision, input and libraries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import torch

# Version of the format of rows, and of Flatout's code that decides their bytes.
VERSION = 1
_LIBRARIES = ("torch", "keras", "numpy", "pillow", "simplejpeg")
# Threads that compute digests of tensors.
_THREADS = 4


def feature_key(tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> str:
    """Return 32 hex digits that differ for features that may have different values.

    Args:
        tensors: parameters and buffers of the frozen layers, by name. All their bytes count, with
            names, shapes and dtypes.
        facts: all other settings that decide the features, as JSON values: the input's content and
            how it is decoded, the autocast dtype, layers that act as in training.

    Raises:
        TypeError: a value of a fact is none that JSON has.
    """
    digest = hashlib.sha256(f"flatout features {VERSION}".encode())
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = pool.map(_sum_of, tensors.values())
        for name, words in sorted(zip(tensors, sums, strict=True)):
            digest.update(json.dumps([name, words]).encode())
    everything = {
        "facts": dict(facts),
        "libraries": _versions(),
        "arithmetic": _arithmetic(),
        "devices": sorted({_kind_of(tensor.device) for tensor in tensors.values()}),
    }
    digest.update(json.dumps(everything, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def _sum_of(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def _arithmetic() -> list[Any]:
    own: Any = torch.backends
    return [
        # torch's common setting for all backends cannot be read if the backends differ.
        own.cuda.matmul.fp32_precision,
        own.cudnn.conv.fp32_precision,
        own.mkldnn.matmul.fp32_precision,
        own.mkldnn.conv.fp32_precision,
        own.mkldnn.enabled,
        own.cpu.get_cpu_capability(),
    ]


def _kind_of(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{torch.cuda.get_device_name(device)}, cuDNN {version}"
