"""Exports weights to safetensors or .keras files, and models to programs of torch.export."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.errors import CheckpointError, ModelError
from flatout.save.best import Which
from flatout.save.checkpoint import read_state
from flatout.save.fits import (
    AVERAGED,
    DDP,
    LIGHTNING,
    all_begin,
    check_fits,
    is_averaged,
    without_levels,
)
from flatout.save.foreign import Weights, read_weights_of
from flatout.save.ids_file import load_ids, save_ids
from flatout.save.keras_export import KERAS_FILES, KerasFile
from flatout.save.model_file import MODEL, is_model_file, save_model
from flatout.save.storage import Folder


@dataclass(frozen=True)
class Export:
    """Report of an export."""

    source: str
    target: str
    tensors: int
    bytes: int
    stripped: tuple[str, ...]
    left_out: tuple[str, ...]
    which: str | None = None
    kept: tuple[str, ...] = ()
    key: str = ""
    other_keys: tuple[str, ...] = ()
    sets: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ExportedProgram:
    """Report of a program's export; `parity` compares the program's outputs with the model's."""

    target: str
    bytes: int
    parity: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    which: Which | None = None,
    key: str | None = None,
    prefix: str | None = None,
    overwrite: bool = False,
) -> Export:
    if os.fspath(source).endswith(KERAS_FILES) and not Folder(source).is_folder():
        if (which, key, prefix) != (None, None, None):
            raise CheckpointError(
                "a Keras file has neither a best and a last, nor keys or prefixes to choose by",
                where=os.fspath(source),
                do="leave --best, --last, --key and --prefix out",
            )
        return _export_keras(KerasFile(source), os.fspath(source), target, overwrite)
    path = _target(source, target)
    _refuse_existing(path, overwrite)
    weights = read_weights_of(source, which, key)
    plain, stripped = _plain_names(weights, prefix)
    tensors = {plain[name]: tensor for name, tensor in weights.tensors.items() if name in plain}
    _export_ids(source, path, weights)
    written = save_model(path, tensors, weights.metadata)
    left_out = [name for name in weights.tensors if name not in plain]
    return Export(
        source=weights.where,
        target=Folder(path).where(),
        tensors=len(tensors),
        bytes=written.size,
        stripped=tuple(stripped),
        left_out=(*left_out, *weights.left_out),
        which=weights.which,
        kept=tuple(kept.describe() for kept in weights.kept),
        key=weights.key,
        other_keys=tuple(weights.other_keys),
        sets=weights.describe(),
    )


def _export_ids(
    source: str | os.PathLike[str], path: str | os.PathLike[str], weights: Weights
) -> None:
    if weights.checkpoint is None:
        ids = load_ids(source) if is_model_file(source) else None
    elif any('"ids"' in text for text in weights.metadata.values()):
        state = read_state(weights.checkpoint)["ids"]
        ids = state["header"], state["tensors"]
    else:
        ids = None
    if ids is not None:
        save_ids(path, *ids)


def export_program(
    model: nn.Module,
    example_inputs: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> ExportedProgram:
    """Write a model in evaluation mode as a torch.export program (.pt2).

    The program accepts inputs of the examples' shapes and dtypes. Before the file gets its name,
    the program is loaded again, and its outputs are compared with the model's.
    """
    _refuse_existing(path, overwrite)
    inputs = tuple(example_inputs)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            expected = model(*inputs)
            data = _traced(model, inputs)
            outputs = torch.export.load(io.BytesIO(data)).module()(*inputs)
    finally:
        for module, mode in modes:
            module.training = mode
    parity = _compare(outputs, expected)
    folder, name = Folder(path).parent()
    folder.remove_abandoned()
    written = folder.write_whole(name, [data])
    return ExportedProgram(folder.where(name), written.size, parity)


def export_program_of(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    factory: str,
    inputs: Sequence[str],
    *,
    which: Which | None = None,
    key: str | None = None,
    prefix: str | None = None,
    overwrite: bool = False,
) -> ExportedProgram:
    """Run `export_program` for the model that `factory` builds, with the weights of `source`.

    Args:
        source: path or URL of the weights, as for `export`.
        target: path or URL of the program, with the suffix .pt2.
        factory: "package.module:callable"; called without arguments, it returns the module. The
            current folder is searched first.
        inputs: shape of each input with its batch dimension, such as "1x28x28", or
            "1x128:int64" if the dtype is not float32.
        which: "best" or "last" weights of a run, as for `export`.
        key: key of a set of weights in a file made by torch.save, as for `export`.
        prefix: prefix to remove from names, as for `export`.
        overwrite: whether a file at `target` may be replaced.

    Raises:
        ModelError: the factory cannot be imported or returns no module, or `export_program` raises
            this error.
        CheckpointError: the weights do not fit the model, or `export` or `export_program` raises
            this error.
    """
    _refuse_existing(target, overwrite)
    examples = [_example(text) for text in inputs]
    model = _build(factory)
    weights = read_weights_of(source, which, key)
    plain, _ = _plain_names(weights, prefix)
    tensors = {plain[name]: tensor for name, tensor in weights.tensors.items() if name in plain}
    check_fits(model.state_dict(), tensors, weights.where)
    model.load_state_dict(tensors)
    return export_program(model, examples, target, overwrite=overwrite)


def _export_keras(
    file: KerasFile, source: str, target: str | os.PathLike[str] | None, overwrite: bool
) -> Export:
    ending = ".keras" if file.has_model and not source.endswith(".keras") else ".safetensors"
    if target is None:
        path = os.path.splitext(source.removesuffix(".weights.h5"))[0] + ending
    else:
        path = os.fspath(target)
        if not path.endswith((".safetensors", ".keras", ".weights.h5")):
            if os.path.splitext(path)[1] and not Folder(path).is_folder():
                raise CheckpointError(
                    "expected a target in .keras, .safetensors or .weights.h5, or a folder, "
                    f"found {path!r}"
                )
            path = Folder(path).where(f"model{ending}")
    _refuse_existing(path, overwrite)
    count, size = file.write(path)
    stripped = () if file.wrapper is None else (file.wrapper,)
    return Export(file.where, Folder(path).where(), count, size, stripped, tuple(file.left_out))


def _target(
    source: str | os.PathLike[str], target: str | os.PathLike[str] | None
) -> str | os.PathLike[str]:
    if target is None:
        parent, name = Folder(source).parent()
        plain = name.removesuffix(".safetensors.index.json")
        stem = name if Folder(source).is_folder() else os.path.splitext(plain)[0]
        return parent.where(f"{stem}.safetensors")
    folder, name = Folder(target).parent()
    suffix = os.path.splitext(name)[1]
    if suffix == ".safetensors":
        return target
    if suffix and not folder.is_folder(name):
        raise CheckpointError(
            f"expected a target in .safetensors or a folder, found {name!r}", where=folder.where()
        )
    return Folder(target).where(MODEL)


def _refuse_existing(path: str | os.PathLike[str], overwrite: bool) -> None:
    folder, name = Folder(path).parent()
    if not overwrite and folder.exists(name):
        raise CheckpointError(
            "the target exists",
            where=folder.where(name),
            do="name another target, or allow it to be replaced (--overwrite, overwrite=True)",
        )


def _plain_names(weights: Weights, prefix: str | None) -> tuple[dict[str, str], list[str]]:
    names = {name: name for name in weights.tensors}
    stripped: list[str] = []
    if prefix is None:
        names, stripped = without_levels(names)
        if not weights.own and is_averaged(names.values()):
            names = {n: p.removeprefix(DDP) for n, p in names.items() if p != AVERAGED}
            stripped.append(DDP)
        for habit, applies in ((DDP, not weights.own), (LIGHTNING, weights.lightning)):
            if applies and all_begin(names.values(), habit):
                names = {name: plain.removeprefix(habit) for name, plain in names.items()}
                stripped.append(habit)
    elif prefix:
        names = {n: n.removeprefix(prefix) for n in names if n.startswith(prefix)}
        stripped.append(prefix)
        if not names:
            raise CheckpointError(
                f"no name begins with {prefix!r}",
                where=weights.where,
                do=f"the names are like {next(iter(weights.tensors), '(none)')!r}",
            )
    taken: dict[str, str] = {}
    for name, plain in names.items():
        if taken.setdefault(plain, name) != name:
            raise CheckpointError(
                f"{name!r} and {taken[plain]!r} would both become {plain!r}",
                where=weights.where,
                do='give the prefix to keep, or "" to keep names as they are',
            )
    return names, stripped


def _traced(model: nn.Module, inputs: tuple[Any, ...]) -> bytes:
    file = io.BytesIO()
    try:
        torch.export.save(torch.export.export(model, inputs), file)
    except Exception as error:  # torch.export raises errors of many types
        raise ModelError(
            f"torch.export cannot trace {type(model).__name__}: {error}",
            do="export to .safetensors, or make forward free of control flow on tensor values",
        ) from error
    return file.getvalue()


def _compare(outputs: Any, expected: Any) -> str:
    try:
        torch.testing.assert_close(outputs, expected, rtol=0, atol=0, equal_nan=True)
        return "bit-identical"
    except AssertionError:
        pass
    try:
        torch.testing.assert_close(outputs, expected, equal_nan=True)
    except AssertionError as error:
        raise ModelError(
            f"the exported program gives other outputs than the model: {error}",
            do="look for random numbers or state that forward changes",
        ) from error
    return "rounding"


def _build(factory: str) -> nn.Module:
    module_name, _, name = factory.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        model = getattr(importlib.import_module(module_name), name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ModelError(
            f"expected package.module:callable, found {factory!r}: {error}",
            do="name a function that takes no arguments and returns the model",
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{factory} returned a {type(model).__name__}, expected an nn.Module")
    return model


def _example(text: str) -> Tensor:
    sizes, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    try:
        shape = [int(size) for size in sizes.split("x")]
    except ValueError:
        shape = []
    if not shape or min(shape) < 0 or not isinstance(dtype, torch.dtype):
        raise ModelError(f"expected an input like 1x28x28 or 1x128:int64, found {text!r}")
    if dtype.is_floating_point:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.zeros(shape, dtype=dtype)
