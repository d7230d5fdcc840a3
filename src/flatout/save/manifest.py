"""The manifest of a checkpoint: a list of the checkpoint's files, with sizes and checksums.

A folder is a checkpoint if it holds an undamaged manifest and all files that the manifest lists.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from flatout.errors import CheckpointError
from flatout.save.seal import BLANK, is_intact, seal
from flatout.save.storage import Folder, Written
from flatout.values import flatten, unflatten

# MANIFEST: name of the file. _FORMAT: version of its form. _SEAL: key of its own SHA-256.
MANIFEST = "manifest.json"
_FORMAT = 1
_SEAL = "manifest_sha256"


@dataclass(frozen=True)
class Manifest:
    step: int
    files: dict[str, Written]
    score: float | None
    meta: dict[str, Any]


def dump(manifest: Manifest) -> bytes:
    tensors, meta = flatten(manifest.meta)
    if tensors:
        raise CheckpointError(f"meta takes no tensors or arrays, found {', '.join(tensors)}")
    fields = {
        _SEAL: BLANK,
        "format": _FORMAT,
        "step": manifest.step,
        "score": manifest.score,
        "files": {name: written._asdict() for name, written in manifest.files.items()},
        "meta": meta,
    }
    return seal(_SEAL, json.dumps(fields, indent=1, allow_nan=False).encode())


def read(folder: Folder) -> Manifest:
    text = folder.read(MANIFEST)
    where = folder.where(MANIFEST)
    try:
        fields = json.loads(text)
        whole = is_intact(_SEAL, text, fields[_SEAL])
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError("damaged: the manifest differs from its own checksum", where=where)
    if fields.get("format") != _FORMAT:
        raise CheckpointError(
            f"checkpoint format {fields.get('format')}, this version reads {_FORMAT}",
            where=where,
            do="update Flatout",
        )
    try:
        return _checked(fields)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the manifest is none that Flatout writes: {type(error).__name__}: {error}",
            where=where,
        ) from error


def _checked(fields: dict[str, Any]) -> Manifest:
    step, score = fields["step"], fields["score"]
    if type(step) is not int or step < 0:
        raise ValueError(f"expected a step from 0 on, found {step!r:.80}")
    if score is not None and type(score) not in (int, float):
        raise ValueError(f"expected a number as score, found {score!r:.80}")
    files = {name: Written(**written) for name, written in fields["files"].items()}
    for name, written in files.items():
        if name.startswith("/") or "\0" in name or {"", ".", ".."} & set(name.split("/")):
            raise ValueError(f"expected names of files within its folder, found {name!r:.200}")
        if type(written.size) is not int or written.size < 0 or type(written.sha256) is not str:
            raise ValueError(f"expected a size and a checksum of {name}, found {written!r:.200}")
    meta = unflatten({}, fields["meta"])
    if not isinstance(meta, dict):
        raise TypeError(f"expected meta data by name, found {meta!r:.80}")
    return Manifest(step, files, score, meta)


def check_sizes(folder: Folder, manifest: Manifest) -> None:
    for name, written in manifest.files.items():
        size = folder.size(name)
        if size != written.size:
            problem = "it is missing" if size is None else f"it has {size:,} bytes"
            raise CheckpointError(
                f"damaged: {problem}, expected {written.size:,} bytes", where=folder.where(name)
            )


def read_file(folder: Folder, manifest: Manifest, name: str) -> bytes:
    written = manifest.files.get(name)
    if written is None:
        raise CheckpointError("not listed in the manifest", where=folder.where(name))
    data = folder.read(name)
    if len(data) != written.size:
        raise CheckpointError(
            f"damaged: it has {len(data):,} bytes, expected {written.size:,}",
            where=folder.where(name),
        )
    digest = hashlib.sha256(data).hexdigest()
    if digest != written.sha256:
        raise CheckpointError(
            f"damaged: it has sha256 {digest[:16]}…, expected {written.sha256[:16]}…",
            where=folder.where(name),
        )
    return data
