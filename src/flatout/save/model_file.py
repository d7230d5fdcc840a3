"""Model files: plain safetensors under the module's own keys, with checksums in the metadata.

The metadata entry `flatout.tensors` holds, as JSON, the SHA-256 of each tensor's bytes (row-major,
little-endian). The entry `flatout.sha256` is the SHA-256 of the header, which includes those
checksums. So checksums cover every byte of the file, and show which tensor is damaged. Any
safetensors reader can read the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.save.seal import BLANK, is_intact, seal
from flatout.save.storage import Chunk, Folder, Written
from flatout.values import DTYPES, flat_bytes, refusal

MODEL = "model.safetensors"
# Index of a model in several files, as transformers writes it: the file of each tensor.
INDEX = "model.safetensors.index.json"

_ENDING, _INDEX_ENDING = ".safetensors", ".safetensors.index.json"
_SEAL = "flatout.sha256"
_DIGESTS = "flatout.tensors"


def save_model(
    path: str | os.PathLike[str],
    state_dict: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write a model file, or replace an older file of that name. The file is complete or absent.

    Args:
        path: path or fsspec URL of the file.
        state_dict: tensors by name, on any device and with any strides, which are not stored. Tied
            weights are stored under each of their names.
        metadata: texts to add to the file's `__metadata__`, by name.

    Raises:
        CheckpointError: a value is no dense tensor of a dtype that safetensors supports, or the
            file cannot be written.
    """
    folder, name = Folder(path).parent()
    folder.remove_abandoned()
    return folder.write_whole(name, encode(state_dict, metadata, where=folder.where(name)))


def is_model_file(path: str | os.PathLike[str]) -> bool:
    """Return whether the name is that of a safetensors file, or of an index of several files."""
    return os.fspath(path).endswith((_ENDING, _INDEX_ENDING))


def load_model(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU, sorted by name.

    Args:
        path: path or fsspec URL of the file or of an index (`model.safetensors.index.json`). If the
            file does not exist, the index next to its path is read, which names several files.

    Raises:
        CheckpointError: the file is missing or is not safetensors, or any byte of a file that
            Flatout wrote has changed.
    """
    return open_model(path)[0]


def open_model(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str], bool]:
    """Return the tensors of `load_model`, the metadata, and whether Flatout wrote all files.

    Flatout's own checksums are not in the returned metadata.
    """
    folder, name = Folder(path).parent()
    if not name.endswith(_INDEX_ENDING):
        index = name.removesuffix(_ENDING) + _INDEX_ENDING
        if not name.endswith(_ENDING) or folder.exists(name) or not folder.exists(index):
            return _open_one(folder, name)
        name = index
    return _open_several(folder, name)


def _open_one(folder: Folder, name: str) -> tuple[dict[str, Tensor], dict[str, str], bool]:
    data = folder.read(name)
    own = check(data, folder.where(name))
    return decode(data, folder.where(name)), metadata_of(data, folder.where(name)), own


def _open_several(folder: Folder, index: str) -> tuple[dict[str, Tensor], dict[str, str], bool]:
    file_by_name = _weight_map(folder, index)
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    own = True
    for file in sorted(set(file_by_name.values())):
        weights, described, is_own = _open_one(folder, file)
        missing = [name for name, of in file_by_name.items() if of == file and name not in weights]
        if missing:
            raise CheckpointError(
                f"{missing[0]!r} is not in it, though {index} says so", where=folder.where(file)
            )
        tensors |= {
            name: tensor for name, tensor in weights.items() if file_by_name.get(name) == file
        }
        metadata |= described
        own = own and is_own
    return dict(sorted(tensors.items())), metadata, own


def _weight_map(folder: Folder, index: str) -> dict[str, str]:
    try:
        file_by_name = json.loads(folder.read(index))["weight_map"]
        files = set(file_by_name.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"expected JSON with a weight_map of names to files: {error}", where=folder.where(index)
        ) from error
    for file in files:
        if not isinstance(file, str) or os.path.basename(file) != file or not is_model_file(file):
            raise CheckpointError(
                f"expected names of safetensors files beside it, found {file!r}",
                where=folder.where(index),
            )
    return dict(file_by_name)


def encode(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, where: str
) -> list[Chunk]:
    """Return the bytes of a safetensors file: a header, then tensors, not copied if possible.

    The safetensors library can only return one byte string of the whole model, or write to a local
    path. This function needs neither a second copy of the model nor a local disk.
    """
    for name, tensor in tensors.items():
        _check_entry(name, tensor, where)
    # Wide dtypes first, then by name, as the library does, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    blocks: list[Chunk] = [flat_bytes(tensors[name].cpu()).numpy().data for name in names]
    digests = {name: hashlib.sha256(b).hexdigest() for name, b in zip(names, blocks, strict=True)}
    header: dict[str, Any] = {
        "__metadata__": {
            _SEAL: BLANK,
            _DIGESTS: json.dumps(dict(sorted(digests.items())), ensure_ascii=False),
            "format": "pt",
            **_without_ours(metadata or {}),
        }
    }
    start = 0
    for name, block in zip(names, blocks, strict=True):
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, start + len(block)],
        }
        start += len(block)
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), seal(_SEAL, text), *blocks]


def decode(data: bytes, where: str) -> dict[str, Tensor]:
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, AssertionError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"not a safetensors file: {error}", where=where) from error
    return dict(sorted(tensors.items()))


def metadata_of(data: bytes, where: str) -> dict[str, str]:
    return _without_ours(_metadata(_header(data, where)[0]))


def check(data: bytes, where: str) -> bool:
    """Raise `CheckpointError` if a byte of a file that Flatout wrote has changed."""
    header, end = _header(data, where)
    metadata = _metadata(header)
    if _SEAL not in metadata and _DIGESTS not in metadata:
        return False
    if not is_intact(_SEAL, data[8:end], metadata.get(_SEAL)):
        raise CheckpointError(
            "damaged: the header differs from its checksum", where=where, do="use another copy"
        )
    content = memoryview(data)[end:]
    for name, expected in json.loads(metadata[_DIGESTS]).items():
        first, last = header[name]["data_offsets"]
        digest = hashlib.sha256(content[first:last]).hexdigest()
        if digest != expected:
            raise CheckpointError(
                f"damaged: tensor {name!r} has sha256 {digest[:16]}…, expected {expected[:16]}…",
                where=f"{where}, bytes {end + first} to {end + last} of {len(data)}",
                do="use another copy",
            )
    return True


def _check_entry(name: object, tensor: Any, where: str) -> None:
    reason = refusal(tensor)
    if reason is None and tensor.dtype not in DTYPES:
        reason = f"safetensors has no {tensor.dtype}"
    if not isinstance(name, str) or name == "__metadata__" or not name.isprintable():
        reason = "this name cannot be in a model file"
    if reason:
        raise CheckpointError(f"cannot store {name!r}: {reason}", where=where)


def _header(data: bytes, where: str) -> tuple[dict[str, Any], int]:
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or end > len(data):
        raise CheckpointError(
            f"not a safetensors file, or cut off: {len(data):,} bytes", where=where
        )
    try:
        header = json.loads(data[8:end])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"not a safetensors file, or damaged: the header is no JSON ({error})", where=where
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError("not a safetensors file: the header is no object", where=where)
    return header, end


def _metadata(header: dict[str, Any]) -> dict[str, Any]:
    metadata = header.get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def _without_ours(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in metadata.items() if key not in (_SEAL, _DIGESTS)}
