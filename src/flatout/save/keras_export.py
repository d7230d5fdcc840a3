"""Keras' files made plain: whole models and weights, without what multi_gpu_model put around them.

`multi_gpu_model` gave back a functional model that slices the batch by Lambda layers, calls the
real model on each slice, and joins the results. What was saved is that wrapper, with the real model
as one of its layers, and code in the Lambdas. Here the Lambdas are cut out of the description
before Keras sees it, and no other code in a file is run: a description that names any is refused.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from flatout.console import first_line
from flatout.errors import CheckpointError, FlatoutError
from flatout.save.any_model import save_model_file
from flatout.save.foreign import BROKEN
from flatout.save.keras_file import is_text, text_in_hdf5
from flatout.save.keras_wrapper import arrays_in, held_in_config, held_in_weights
from flatout.save.model_file import save_model
from flatout.save.storage import Folder
from flatout.save.weights_file import text_in

WHOLE = (".keras", ".h5", ".hdf5")
_WEIGHTS = ".weights.h5"
# Layers whose config holds code, or a file to run code from.
_CODE = ("Lambda", "__lambda__", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer")
# Where Keras' own classes and functions are; anything else would have to be imported.
_HOMES = (
    "activations", "constraints", "dtype_policies", "initializers", "layers", "models", "ops",
    "quantizers", "random", "regularizers", "src.layers", "src.models", "src.ops",
)  # fmt: skip
# A file that claims to hold more than this many times its size is not believed.
_MOST = 1_000


def is_keras_file(name: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a Keras model or of its weights."""
    return os.fspath(name).endswith(WHOLE)


class KerasFile:
    """A Keras file that has been looked through; nothing of it was run.

    Attributes:
        where: the file.
        wrapper: name of the model that held the real one as a layer; None without one.
        left_out: what it holds that no plain file keeps: the optimizer.
        has_model: whether it describes a model; else it holds weights alone.
        metadata: text that goes with the model.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        folder, name = Folder(source).parent()
        self.where = folder.where(name)
        if not folder.exists(name):
            raise CheckpointError("there is no such file or folder", where=self.where)
        self._data = folder.read(name)
        self._config: dict[str, Any] | None = None
        self._inner: str | None = None
        self.wrapper: str | None = None
        self.left_out: list[str] = []
        self.metadata: dict[str, str] = {}
        if name.endswith(".keras"):
            self._look_into_zip()
        else:
            self._look_into_hdf5(self._data)
        if self._config is not None:
            if _drop_compiling(self._config) and not self.left_out:
                self.left_out.append("optimizer")
            try:
                _in_new_form(self._config)
                self._take_off_wrapper(self._config)
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise _no_description(self.where, error) from error
            _refuse_code(self._config, self.where)

    @property
    def has_model(self) -> bool:
        """Whether it describes a model; else it holds weights alone."""
        return self._config is not None

    def model(self) -> Any:
        """The real model, built by Keras with the file's weights."""
        keras = _keras()
        if self._inner is None:
            return self._built(keras)
        try:
            return self._built(keras).get_layer(self._inner)
        except CheckpointError as error:
            # Keras 2 counted the building of a model as its first call, Keras 3 does not always.
            assert self._config is not None
            for origin in _origins(self._config["config"]["output_layers"]):
                origin[1] = 0
            with suppress(CheckpointError):
                return self._built(keras).get_layer(self._inner)
            raise error

    def _built(self, keras: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="flatout-") as beside, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                local = self._without_wrapper(Path(beside))
                return keras.saving.load_model(local, compile=False, safe_mode=True)
            except Exception as error:  # of many types, for whatever does not fit
                raise CheckpointError(
                    f"Keras cannot build the model: {first_line(error)}",
                    where=self.where,
                    do="if it has its own classes, load it in the script that defines them, "
                    "and save it from there",
                ) from error

    def weights(self) -> dict[str, torch.Tensor]:
        """Of a file of weights: by the names in it, without `layers`, `vars` and `:0`."""
        with _open(self._data, self.where) as file:
            if _is_old(file):
                return dict(_old_weights(file, self.where))
            group, _ = self._layers_of(file)
            return {
                "/".join(p for p in path.split("/") if p not in ("layers", "vars")): _tensor(array)
                for path, array in arrays_in(group)
                if not is_text(path) and not _optimizer_in(path)
            }

    def write_weights(self, target: str) -> int:
        """Write a file of weights as Keras writes that of the real model; returns its size."""
        import h5py

        made = io.BytesIO()
        with _open(self._data, self.where) as file, h5py.File(made, "w") as plain:
            if _is_old(file):
                raise CheckpointError(
                    "weights as Keras 2 wrote them are in another order than a .weights.h5",
                    where=self.where,
                    do="name a target in .safetensors",
                )
            group, _ = self._layers_of(file)
            for name in {**dict.fromkeys(group), **self.metadata}.keys() - {"optimizer"}:
                (group if name in group else file).copy(name, plain)
            for path in {_optimizer_in(path) for path, _ in arrays_in(plain)} - {""}:
                del plain[path]
        folder, name = Folder(target).parent()
        return folder.write_whole(name, [made.getbuffer()]).size

    # -- looking ---------------------------------------------------------------------------------

    def _look_into_zip(self) -> None:
        try:
            with zipfile.ZipFile(io.BytesIO(self._data)) as file:
                claimed = sum(member.file_size for member in file.infolist())
                if claimed > _MOST * len(self._data):
                    raise _too_large(claimed, len(self._data), self.where)
                text, weights = file.read("config.json"), file.read("model.weights.h5")
                self.metadata = text_in(file, self.where)
        except CheckpointError:
            raise
        except (*BROKEN, KeyError, OSError, ValueError) as error:
            raise CheckpointError(
                f"not a .keras file, or damaged: {error}", where=self.where
            ) from error
        self._config = _parsed(text, self.where)
        self._look_into_hdf5(weights)

    def _look_into_hdf5(self, data: bytes) -> None:
        with _open(data, self.where) as file:
            _check_links(file, len(data), self.where)
            if self._config is not None:
                return
            self.metadata = text_in_hdf5(file)
            if "model_config" in file.attrs:
                self._config = _parsed(file.attrs["model_config"], self.where)
                if "optimizer_weights" in file:
                    self.left_out.append("optimizer")
            elif "layers" in file or "vars" in file:
                _, self.wrapper = self._layers_of(file)
                if any(_optimizer_in(path) for path, _ in arrays_in(file)):
                    self.left_out.append("optimizer")
            elif not _is_old(file):
                raise CheckpointError(
                    f"expected a Keras model or its weights, found {_listed(list(file))}",
                    where=self.where,
                )

    def _layers_of(self, file: Any) -> tuple[Any, str | None]:
        group, wrapper = file, None
        while (inner := held_in_weights(group)) is not None:
            if wrapper is None:
                wrapper = str(group["vars"].attrs.get("name", "")) or "the outer model"
            group = group["layers"][inner]
        return group, wrapper

    # -- the wrapper -----------------------------------------------------------------------------

    def _take_off_wrapper(self, config: dict[str, Any]) -> None:
        layer = held_in_config(config)
        if layer is None:
            return
        outer, inner = config["config"], layer["config"]["name"]
        self.wrapper, self._inner = outer["name"], inner
        came_from = {
            layer["config"]["name"]: _origins(layer["inbound_nodes"])[0]
            for layer in outer["layers"]
            if layer["class_name"] == "Lambda"
        }
        joins = [layer for layer in outer["layers"] if layer["class_name"] == "Concatenate"]
        outer["layers"] = [
            layer
            for layer in outer["layers"]
            if layer["class_name"] not in ("Lambda", "Concatenate")
        ]
        layer["inbound_nodes"] = layer["inbound_nodes"][:1]
        for origin in _origins(layer["inbound_nodes"]):
            if origin[0] in came_from:
                origin[:3] = came_from[origin[0]][:3]
        if joins:
            outer["output_layers"] = [_origins(joins[0]["inbound_nodes"])[0][:3]]

    def _without_wrapper(self, beside: Path) -> Path:
        is_zip = self.where.endswith(".keras")
        local = beside / ("model.keras" if is_zip else "model.h5")
        if not is_zip:
            import h5py

            local.write_bytes(self._data)
            with h5py.File(local, "r+") as file:
                file.attrs["model_config"] = json.dumps(self._config)
                if self._inner is not None:
                    group = file["model_weights"]
                    group.attrs["layer_names"] = [
                        name for name in _names(group, "layer_names") if name == self._inner
                    ]
            return local
        with (
            zipfile.ZipFile(io.BytesIO(self._data)) as old,
            zipfile.ZipFile(local, "w") as new,
        ):
            for member in old.namelist():
                if member != "config.json":
                    new.writestr(member, old.read(member))
            new.writestr("config.json", json.dumps(self._config))
        return local


def write(file: KerasFile, target: str) -> tuple[int, int]:
    """Write the model (.keras) or its weights; returns how many arrays, and the size in bytes.

    Raises:
        CheckpointError: the file holds weights alone and a model is wanted, or it cannot be
            written.
    """
    if file.has_model:
        model = file.model()
        save_model_file(target, model, file.metadata)
        folder, name = Folder(target).parent()
        return len(model.weights), folder.size(name) or 0
    weights = file.weights()
    if target.endswith(".safetensors"):
        return len(weights), save_model(target, weights, file.metadata).size
    if target.endswith(_WEIGHTS):
        return len(weights), file.write_weights(target)
    raise CheckpointError(
        "the file holds weights alone, and a .keras file a whole model",
        where=file.where,
        do="build the model, load_weights, and save it; or name a target in .safetensors",
    )


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
    if keras.backend.backend() != "torch":
        raise FlatoutError(
            f"Keras runs on {keras.backend.backend()} in this process, and Flatout reads its "
            "models on torch",
            do="set KERAS_BACKEND=torch",
        )
    return keras


# -- descriptions ----------------------------------------------------------------------------------


def _parsed(text: Any, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"the model's description is no JSON: {error}", where=where
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("config"), (dict, list)):
        raise _no_description(where)
    return config


def _no_description(where: str, error: Exception | None = None) -> CheckpointError:
    reason = "" if error is None else f": {type(error).__name__} {error}"
    return CheckpointError(f"the model's description is none of Keras'{reason}", where=where)


def _origins(nodes: Any) -> list[list[Any]]:
    if isinstance(nodes, dict):
        return [origin for part in nodes.values() for origin in _origins(part)]
    if not isinstance(nodes, list):
        return []
    if len(nodes) >= 3 and isinstance(nodes[0], str) and isinstance(nodes[1], int):
        return [nodes]
    return [origin for part in nodes for origin in _origins(part)]


def _drop_compiling(config: dict[str, Any]) -> bool:
    """Take out how the model and those within it were compiled; return whether any was."""
    was_compiled = False
    waiting: list[Any] = [config]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            was_compiled |= bool("class_name" in part and part.pop("compile_config", None))
        if isinstance(part, (dict, list)):
            waiting += part.values() if isinstance(part, dict) else part
    return was_compiled


def _in_new_form(config: dict[str, Any]) -> None:
    is_sequential = config.get("class_name") == "Sequential"
    if is_sequential and isinstance(config["config"], list):
        config["config"] = {"name": config.get("name", "sequential"), "layers": config["config"]}
    options = config.get("config")
    layers = options.get("layers") if isinstance(options, dict) else None
    for layer in layers or ():
        _in_new_form(layer)
    if not is_sequential or not layers:
        return
    first = layers[0]["config"]
    if layers[0]["class_name"] != "InputLayer" and "batch_input_shape" in first:
        name, shape = f"{first['name']}_input", first.pop("batch_input_shape")
        own = {"batch_input_shape": shape, "dtype": first.get("dtype", "float32"), "name": name}
        layers.insert(0, {"class_name": "InputLayer", "config": own})


def _refuse_code(config: dict[str, Any], where: str) -> None:
    """Refuse a description that Keras could only follow by running or importing something else."""
    waiting: list[tuple[Any, str]] = [(config, "the model")]
    while waiting:
        part, inside = waiting.pop()
        if isinstance(part, list):
            waiting.extend((child, inside) for child in part)
        if not isinstance(part, dict):
            continue
        kind, options = part.get("class_name"), part.get("config")
        if isinstance(options, dict) and isinstance(options.get("name"), str):
            inside = f"layer {options['name']!r}"
        if kind in _CODE:
            raise CheckpointError(
                f"{inside} is a {kind}: building it would execute code that the file holds",
                where=where,
                do="build the model in your own code, load_weights from the file, and save it; "
                "layers of Keras or keras.ops in place of a Lambda need no code in files",
            )
        module = part.get("module")
        if kind is not None and module is not None and not _is_of_keras(module, kind):
            raise CheckpointError(
                f"{inside} names {module}.{kind}, which is not of Keras",
                where=where,
                do="load it in the script that defines it, and save it from there",
            )
        waiting.extend((child, inside) for child in part.values())


def _is_of_keras(module: Any, kind: Any) -> bool:
    if kind == "function":
        return module in ("keras.activations", "keras.src.activations.activations")
    homes = tuple(f"keras.{home}" for home in _HOMES)
    return isinstance(module, str) and (
        module == "keras" or module in homes or module.startswith(tuple(f"{h}." for h in homes))
    )


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


def _check_links(file: Any, size: int, where: str) -> None:
    """Refuse what leads out of the file, and arrays that the file cannot hold."""
    import h5py

    visited: set[Any] = set()
    waiting = [file]
    claimed = 0
    while waiting:
        group = waiting.pop()
        for name in group:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise CheckpointError(
                    f"{group.name}/{name} is a link to somewhere else", where=where
                )
            part = group[name]
            if isinstance(part, h5py.Group):
                if part.id in visited:  # it may be within itself
                    raise CheckpointError(f"{part.name} is there twice", where=where)
                visited.add(part.id)
                waiting.append(part)
                continue
            if not isinstance(part, h5py.Dataset) or part.external or part.is_virtual:
                raise CheckpointError(f"{part.name} is no array of this file", where=where)
            claimed += part.nbytes
    if claimed > _MOST * size:
        raise _too_large(claimed, size, where)


def _too_large(claimed: int, size: int, where: str) -> CheckpointError:
    return CheckpointError(
        f"it claims to unpack to {claimed:,} bytes, {claimed // max(size, 1):,} times its size",
        where=where,
    )


def _optimizer_in(path: str) -> str:
    """Name the group of the optimizer that an array is of; "" for an array of a layer."""
    parts = path.split("/")
    for depth, part in enumerate(parts):
        if part == "optimizer" and parts[depth - 1] != "layers":  # a layer may be called so
            return "/".join(parts[: depth + 1])
    return ""


def _old_weights(file: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    names: set[str] = set()
    for layer in _names(file, "layer_names"):
        for weight in _names(file[layer], "weight_names") if layer in file else ():
            plain = weight.removesuffix(":0")
            name = f"{layer}/{plain}" if plain in names or "/" not in plain else plain
            if name in names or weight not in file[layer]:
                raise CheckpointError(
                    f"weight {name!r} is {'there twice' if name in names else 'missing'}",
                    where=where,
                )
            names.add(name)
            yield name, _tensor(file[layer][weight])


def _is_old(file: Any) -> bool:
    return "layer_names" in file.attrs or "layer_names0" in file.attrs


def _names(group: Any, attribute: str) -> list[str]:
    if attribute in group.attrs:
        return [_text(name) for name in group.attrs[attribute]]
    names: list[str] = []
    while (part := f"{attribute}{len(names)}") in group.attrs:
        names.append(part)
    return [_text(name) for part in names for name in group.attrs[part]]


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array[()].copy() if array.shape else array[()].reshape(1)[:])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) or "nothing"
