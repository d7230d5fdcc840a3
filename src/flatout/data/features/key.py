"""Key of stored features, from weights, precision, input and libraries; names of their samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import blake2b
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

NAMES_VERSION = 1
"""Version of the names of samples."""

# Bytes of a name.
_BYTES = 16
# Seed of the fixed factors of the hash.
_SEED = 20_261_126


def sample_names(*tensors: Tensor) -> list[bytes]:
    """Return a name for each sample of a batch, made of its bytes, shape and dtype.

    On a CPU, names are BLAKE2b digests. On another device, four multilinear hashes of 32 bits with
    fixed factors are computed there, so that only the hashes are copied to the host. See Lemire and
    Kaser, "Strongly universal string hashing is fast" (2014).

    Args:
        tensors: tensors on one device and of the same length, whose rows make up a sample.
    """
    every = [_names_of(tensor) for tensor in tensors]
    if len(every) == 1:
        return every[0]
    together = zip(*every, strict=True)
    return [blake2b(b"".join(parts), digest_size=_BYTES).digest() for parts in together]


def _names_of(batch: Tensor) -> list[bytes]:
    rows = batch.detach().contiguous().reshape(len(batch), -1).view(torch.uint8)
    words = repr((batch.dtype, tuple(batch.shape[1:]))).encode()
    form = blake2b(words, digest_size=_BYTES)
    names = []
    for row in rows.numpy() if rows.device.type == "cpu" else hashed(rows).cpu().numpy():
        copy = form.copy()
        copy.update(row)
        names.append(copy.digest())
    return names


def hashed(rows: Tensor) -> Tensor:
    """Return a hash of 16 bytes for each row, computed on the device of the rows."""
    if rest := -rows.shape[1] % 4:
        rows = torch.nn.functional.pad(rows, (0, rest))
    words = rows.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    factors = _factors(words.shape[1] + 1, rows.device)
    # Products and sums are taken modulo 2^64; the upper 32 bits are the hash.
    sums = [(words * own[1:]).sum(1) + own[0] for own in factors]
    halves = torch.stack(sums, 1).view(torch.int32)[:, 1::2]
    return halves.contiguous().view(torch.uint8)


@lru_cache(maxsize=8)
def _factors(count: int, device: torch.device) -> Any:
    drawn = torch.Generator().manual_seed(_SEED)
    bits = torch.randint(-(2**31), 2**31, (2, 4, count), generator=drawn, dtype=torch.int64)
    return ((bits[0] << 32) ^ (bits[1] & 0xFFFFFFFF)).to(device)


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
