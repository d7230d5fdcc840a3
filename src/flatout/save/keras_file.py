"""Keras models in files that Keras itself writes: `.keras` and `.weights.h5`.

Texts that belong to a model are stored in a member `flatout.json` of the `.keras` archive, or in a
dataset of the HDF5 file. Keras ignores them when it reads the file.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.console import first_line
from flatout.errors import CheckpointError
from flatout.models import load_weights, weights_of
from flatout.save.foreign import check_archive
from flatout.save.keras_wrapper import held_in_config, held_in_weights
from flatout.save.storage import Folder
from flatout.save.weights_file import MEMBER, text_in

# Start of the names of Flatout's own entries in a file.
OURS = "flatout."


def save_keras(model: Any, path: str | Path, metadata: Mapping[str, str] | None = None) -> Path:
    name = os.fspath(path)
    suffix = ".keras" if name.endswith(".keras") else ".weights.h5"
    folder, file = Folder(name).parent()
    with tempfile.TemporaryDirectory(prefix="flatout-") as beside:
        local = Path(beside, f"model{suffix}")
        model.save(local) if suffix == ".keras" else model.save_weights(local)
        if metadata:
            _add(local, metadata)
        folder.write_whole(file, [local.read_bytes()])
    return Path(path)


def load_keras(
    model: Any, path: str | Path, prepare: Callable[[dict[str, str]], object] = bool
) -> dict[str, str]:
    name = os.fspath(path)
    suffix = ".keras" if name.endswith(".keras") else ".weights.h5"
    folder, file = Folder(name).parent()
    data = folder.read(file)
    check_archive(io.BytesIO(data), name)
    with tempfile.TemporaryDirectory(prefix="flatout-") as beside:
        local = Path(beside, f"model{suffix}")
        local.write_bytes(data)
        try:
            text = _text_of(local, name)
        except Exception as error:
            raise _unreadable(name, error) from error
        prepare(text)
        before = {name: tensor.clone() for name, tensor in weights_of(model).items()}
        try:
            model.load_weights(local)
        except Exception as error:
            load_weights(model, before)  # restore, since Keras may have loaded some weights
            raise _unreadable(name, error, _is_wrapped(local)) from error
    return text


def _unreadable(name: str, error: Exception, is_wrapped: bool = False) -> CheckpointError:
    do = "check that the file is whole and of the same model"
    if is_wrapped:
        plain = "plain.keras" if name.endswith(".keras") else "plain.weights.h5"
        do = (
            "the file's model holds another one as a layer; to load the inner model's weights: "
            f"`flatout export {shlex.quote(name)} {plain}`, and load {plain}"
        )
    return CheckpointError(f"the weights cannot be loaded: {first_line(error)}", where=name, do=do)


def _is_wrapped(file: Path) -> bool:
    import h5py

    with suppress(Exception):  # a damaged file may raise any type of error
        if file.suffix == ".keras":
            with zipfile.ZipFile(file) as archive:
                return held_in_config(json.loads(archive.read("config.json"))) is not None
        with h5py.File(file) as opened:
            return held_in_weights(opened) is not None
    return False


def _add(file: Path, metadata: Mapping[str, str]) -> None:
    if file.suffix == ".keras":
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(MEMBER, json.dumps(dict(metadata), ensure_ascii=False))
        return
    import h5py

    with h5py.File(file, "a") as opened:
        for name, text in metadata.items():
            opened[name] = text  # a dataset, since an attribute holds at most 64 KiB


def _text_of(file: Path, where: str) -> dict[str, str]:
    if file.suffix == ".keras":
        with zipfile.ZipFile(file) as archive:
            return text_in(archive, where)
    import h5py

    with h5py.File(file) as opened:
        return text_in_hdf5(opened)


def text_in_hdf5(file: Any) -> dict[str, str]:
    import h5py

    own = [
        file[name]
        for name in file
        if name.startswith(OURS) and isinstance(file.get(name, getlink=True), h5py.HardLink)
    ]
    return {
        entry.name.removeprefix("/"): str(entry.asstr("utf-8", "replace")[()])
        for entry in own
        if isinstance(entry, h5py.Dataset)
        and entry.shape == ()
        and h5py.check_string_dtype(entry.dtype)
    }
