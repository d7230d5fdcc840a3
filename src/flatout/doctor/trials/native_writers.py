"""Redirects native code that opens files by name, once its module is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from flatout.doctor.trials.view import Name, View
from flatout.hooks import when_imported


def redirect_native(view: View) -> None:
    """Patch torch, safetensors and h5py once they are imported; `view` maps their paths."""

    def of_torch(module: Any) -> None:
        core = module.torch._C
        core.PyTorchFileWriter = _on_name(core.PyTorchFileWriter, 0, view.to_write)
        core.PyTorchFileReader = _on_name(core.PyTorchFileReader, 0, view.to_read)

    def of_safetensors(module: Any) -> None:
        module.serialize_file = _on_name(module.serialize_file, 1, view.to_write)
        module.safe_open = _on_name(module.safe_open, 0, view.to_read)

    def of_h5py(module: Any) -> None:
        native = module.make_fid

        def make_fid(name: Name, mode: str, *args: Any, **options: Any) -> Any:
            writes = mode not in ("r", None)
            text = os.fsdecode(name)
            mapped = view.to_write(text) if writes else view.to_read(text)
            return native(os.fsencode(mapped), mode, *args, **options)

        module.make_fid = make_fid

    when_imported("torch.serialization", of_torch)
    when_imported("safetensors", of_safetensors)
    when_imported("h5py._hl.files", of_h5py)


def _on_name(native: Any, place: int, where: Callable[[Name], str]) -> Callable[..., Any]:
    def mapped(*args: Any, **options: Any) -> Any:
        given = list(args)
        if len(given) > place and isinstance(given[place], (str, bytes, os.PathLike)):
            given[place] = where(given[place])
        elif isinstance(options.get("filename"), (str, os.PathLike)):
            options["filename"] = where(options["filename"])
        return native(*given, **options)

    return mapped
