"""Exports plain files of Keras models and weights, without the wrapper of multi_gpu_model.

`multi_gpu_model` returned a functional model that slices the batch by Lambda layers, calls the real
model on each slice, and joins the results. Its file holds the real model as a layer, and code in
the Lambdas. The description is reduced to the real model before Keras reads it. A description that
names other code is refused, so no code of a file runs.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flatout.console import first_line
from flatout.errors import CheckpointError, FlatoutError
from flatout.save.any_model import save_model_file
from flatout.save.foreign import BROKEN
from flatout.save.keras_file import OURS, text_in_hdf5
from flatout.save.keras_wrapper import held_in_config, held_in_weights
from flatout.save.model_file import save_model
from flatout.save.storage import Folder
from flatout.save.weights_file import text_in

# Suffixes of Keras files.
KERAS_FILES = (".keras", ".h5", ".hdf5")
# Layers whose config holds code, or names a file with code.
_CODE = ("Lambda", "__lambda__", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer")
# Modules of Keras that a description may name. Keras would import any other module.
_HOMES = (
    "activations", "constraints", "dtype_policies", "initializers", "layers", "models", "ops",
    "quantizers", "random", "regularizers", "src.layers", "src.models", "src.ops",
)  # fmt: skip
# Maximum ratio of unpacked bytes to bytes of a file; a file that claims more is refused.
_MOST = 1_000


class KerasFile:
    """A Keras file that was read without running anything in it."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        folder, name = Folder(source).parent()
        self.where = folder.where(name)
        self._data = folder.read(name)
        self._is_archive = name.endswith(".keras")
        self._config: Any = None
        self.wrapper: str | None = None
        self.left_out: list[str] = []
        self.metadata: dict[str, str] = {}
        weights = self._read_archive() if self._is_archive else self._data
        with _open(weights, self.where) as file:
            self._read_hdf5(file, len(weights))
        self.has_model = self._config is not None
        if not self.has_model:
            return
        try:
            self._config = json.loads(self._config or "")
            _in_new_form(self._config)
            self._take_off_wrapper()
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"the model's description is none of Keras': {type(error).__name__} {error}",
                where=self.where,
            ) from error
        _check_description(self._config, self.where)

    def write(self, target: str) -> tuple[int, int]:
        """Write the model or its weights; return the number of arrays and the size in bytes."""
        folder, name = Folder(target).parent()
        if self.has_model:
            model = self._model()
            save_model_file(target, model, self.metadata)
            return len(model.weights), folder.size(name) or 0
        weights = self._weights()
        if target.endswith(".safetensors"):
            return len(weights), save_model(target, weights, self.metadata).size
        if target.endswith(".weights.h5"):
            return len(weights), folder.write_whole(name, [self._plain_weights()]).size
        raise CheckpointError(
            "the file holds weights alone, and a .keras file a whole model",
            where=self.where,
            do="build the model, load_weights, and save it; or name a target in .safetensors",
        )

    # -- reading ---------------------------------------------------------------------------------

    def _read_archive(self) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(self._data)) as file:
                claimed = sum(member.file_size for member in file.infolist())
                _check_claim(claimed, len(self._data), self.where)
                self._config = file.read("config.json")
                self.metadata = text_in(file, self.where)
                return file.read("model.weights.h5")
        except CheckpointError:
            raise
        except (*BROKEN, KeyError, OSError, ValueError) as error:
            raise CheckpointError(
                f"not a .keras file, or damaged: {error}", where=self.where
            ) from error

    def _read_hdf5(self, file: Any, size: int) -> None:
        _check_arrays(file, size, self.where)
        if "optimizer_weights" in file or any(map(_optimizer_in, _paths(file))):
            self.left_out = ["optimizer"]
        if self._is_archive:
            return
        self.metadata = text_in_hdf5(file)
        self._config = file.attrs.get("model_config")
        if self._config is not None or _is_old(file):
            return
        if "layers" not in file and "vars" not in file:
            names = ", ".join(map(repr, list(file)[:5])) or "nothing"
            raise CheckpointError(
                f"expected a Keras model or its weights, found {names}", where=self.where
            )
        if held_in_weights(file) is not None:
            self.wrapper = str(file["vars"].attrs.get("name", "the outer model"))

    def _take_off_wrapper(self) -> None:
        inner = held_in_config(self._config)
        if inner is None:
            return
        outer = self._config["config"]
        self.wrapper = outer["name"]
        self._inner = inner["config"]["name"]
        # A Sequential model with the real model as its only layer: Keras then finds the weights at
        # the same paths.
        inputs = [layer for layer in outer["layers"] if layer["class_name"] == "InputLayer"]
        layers = [*inputs, inner] if len(inputs) == 1 else [inner]
        for layer in layers:
            layer.pop("inbound_nodes", None)
        self._config = {
            "module": "keras",
            "class_name": "Sequential",
            "config": {"name": self.wrapper, "layers": layers},
        }

    # -- writing ---------------------------------------------------------------------------------

    def _model(self) -> Any:
        keras = _keras()
        with tempfile.TemporaryDirectory(prefix="flatout-") as beside, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                local = self._with_description(Path(beside))
                model = keras.saving.load_model(local, compile=False, safe_mode=True)
                return model if self.wrapper is None else model.get_layer(self._inner)
            except Exception as error:  # Keras raises errors of many types
                raise CheckpointError(
                    f"Keras cannot build the model: {first_line(error)}",
                    where=self.where,
                    do="if it has its own classes, load it in the script that defines them, "
                    "and save it from there",
                ) from error

    def _with_description(self, folder: Path) -> Path:
        text = json.dumps(self._config)
        if self._is_archive:
            local = folder / "model.keras"
            with (
                zipfile.ZipFile(io.BytesIO(self._data)) as old,
                zipfile.ZipFile(local, "w") as new,
            ):
                for member in set(old.namelist()) - {"config.json"}:
                    new.writestr(member, old.read(member))
                new.writestr("config.json", text)
            return local
        import h5py

        local = folder / "model.h5"
        local.write_bytes(self._data)
        with h5py.File(local, "r+") as file:
            file.attrs["model_config"] = text
            if self.wrapper is not None:
                file["model_weights"].attrs["layer_names"] = [self._inner]
        return local

    def _weights(self) -> dict[str, torch.Tensor]:
        with _open(self._data, self.where) as file:
            if _is_old(file):
                return dict(_old_weights(file, self.where))
        with _open(self._plain_weights(), self.where) as file:
            return {
                "/".join(part for part in path.split("/") if part not in ("layers", "vars")): (
                    _tensor(file[path])
                )
                for path in _paths(file)
                if hasattr(file[path], "shape") and not path.startswith(OURS)
            }

    def _plain_weights(self) -> bytes:
        """Return the bytes of a .weights.h5 file of the real model, without optimizer state."""
        import h5py

        made = io.BytesIO()
        with _open(self._data, self.where) as file, h5py.File(made, "w") as plain:
            if _is_old(file):
                raise CheckpointError(
                    "weights as Keras 2 wrote them are in another order than a .weights.h5",
                    where=self.where,
                    do="name a target in .safetensors",
                )
            group: Any = file if self.wrapper is None else held_in_weights(file)
            for name in group:
                group.copy(name, plain)
            for name in self.metadata.keys() - set(group):
                file.copy(name, plain)
            for path in {_optimizer_in(path) for path in _paths(plain)} - {""}:
                del plain[path]
        return made.getvalue()


def _keras() -> Any:
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "torch")
    try:
        import keras
    except ImportError as error:
        if isinstance(error, FlatoutError):
            raise
        raise FlatoutError(
            "reading a Keras model needs Keras", do="pip install 'flatout[keras]'"
        ) from error
    return keras


# -- descriptions ----------------------------------------------------------------------------------


def _in_new_form(config: dict[str, Any]) -> None:
    """Change a Keras 2 description, and nested models, so that Keras 3 can read it."""
    is_sequential = config["class_name"] == "Sequential"
    if is_sequential and isinstance(config["config"], list):
        config["config"] = {"name": config.get("name", "sequential"), "layers": config["config"]}
    layers = config["config"].get("layers")
    for layer in layers or ():
        _in_new_form(layer)
    if not is_sequential or not layers:
        return
    first = layers[0]["config"]
    if layers[0]["class_name"] != "InputLayer" and "batch_input_shape" in first:
        name, shape = f"{first['name']}_input", first.pop("batch_input_shape")
        own = {"batch_input_shape": shape, "dtype": first.get("dtype", "float32"), "name": name}
        layers.insert(0, {"class_name": "InputLayer", "config": own})


def _check_description(config: dict[str, Any], where: str) -> None:
    """Refuse a description that holds code or names code outside Keras; drop compile options."""
    waiting: list[tuple[Any, str]] = [(config, "the model")]
    while waiting:
        part, inside = waiting.pop()
        if isinstance(part, list):
            waiting.extend((child, inside) for child in part)
        if not isinstance(part, dict):
            continue
        kind, options, module = (part.get(key) for key in ("class_name", "config", "module"))
        if isinstance(options, dict) and isinstance(options.get("name"), str):
            inside = f"layer {options['name']!r}"
        if kind in _CODE:
            raise CheckpointError(
                f"{inside} is a {kind}: building it would execute code that the file holds",
                where=where,
                do="build the model in your own code, load_weights from the file, and save it; "
                "layers of Keras or keras.ops in place of a Lambda need no code in files",
            )
        if kind is not None:
            part.pop("compile_config", None)
            if module is not None and not _is_of_keras(module, kind):
                raise CheckpointError(
                    f"{inside} names {module}.{kind}, which is not of Keras",
                    where=where,
                    do="load it in the script that defines it, and save it from there",
                )
        waiting.extend((child, inside) for child in part.values())


def _is_of_keras(module: Any, kind: Any) -> bool:
    if kind == "function":
        return module in ("keras.activations", "keras.src.activations.activations")
    homes = tuple(f"keras.{home}." for home in _HOMES)
    return isinstance(module, str) and (module == "keras" or f"{module}.".startswith(homes))


# -- HDF5 ------------------------------------------------------------------------------------------


@contextmanager
def _open(data: bytes, where: str) -> Iterator[Any]:
    try:
        import h5py
    except ImportError as error:
        raise FlatoutError(
            "reading a Keras file needs h5py", do="pip install 'flatout[hdf5]'"
        ) from error
    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            yield file
    except CheckpointError:
        raise
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"not an HDF5 file, or damaged: {error}", where=where) from error


def _check_arrays(file: Any, size: int, where: str) -> None:
    """Refuse links out of the file, and arrays whose size is implausible for the file."""
    import h5py

    links: list[tuple[str, Any]] = []
    file.visititems_links(lambda name, link: links.append((name, link)))
    claimed = 0
    for name, link in links:
        if not isinstance(link, h5py.HardLink):
            raise CheckpointError(f"/{name} is a link to somewhere else", where=where)
        part = file[name]
        if isinstance(part, h5py.Group):
            continue
        if not isinstance(part, h5py.Dataset) or part.external or part.is_virtual:
            raise CheckpointError(f"{part.name} is no array of this file", where=where)
        claimed += part.nbytes
    _check_claim(claimed, size, where)


def _check_claim(claimed: int, size: int, where: str) -> None:
    if claimed > _MOST * size:
        raise CheckpointError(
            f"it claims to unpack to {claimed:,} bytes, {claimed // max(size, 1):,} times its size",
            where=where,
        )


def _paths(group: Any) -> list[str]:
    paths: list[str] = []
    group.visit(paths.append)
    return paths


def _optimizer_in(path: str) -> str:
    """Return the path of the optimizer's group that contains `path`, or "" without such a group."""
    parts = path.split("/")
    for depth, part in enumerate(parts):
        if part == "optimizer" and parts[max(depth - 1, 0)] != "layers":  # a layer may be named so
            return "/".join(parts[: depth + 1])
    return ""


def _is_old(file: Any) -> bool:
    return "layer_names" in file.attrs or "layer_names0" in file.attrs


def _old_weights(file: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    names: set[str] = set()
    for layer in _names(file, "layer_names"):
        for weight in _names(file[layer], "weight_names"):
            plain = weight.removesuffix(":0")
            name = f"{layer}/{plain}" if plain in names or "/" not in plain else plain
            if name in names:
                raise CheckpointError(f"weight {name!r} is there twice", where=where)
            names.add(name)
            yield name, _tensor(file[layer][weight])


def _names(group: Any, attribute: str) -> list[str]:
    """Return the names in an attribute; Keras splits a long attribute into numbered attributes."""
    names = list(group.attrs.get(attribute, ()))
    part = 0
    while f"{attribute}{part}" in group.attrs:
        names.extend(group.attrs[f"{attribute}{part}"])
        part += 1
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array[()].copy() if array.shape else array[()].reshape(1)[:])
