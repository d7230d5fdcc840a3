"""Native code that opens files by name, told where they are, once its module is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from flatout.doctor.trials.view import Name, View


class NativeWriters(importlib.abc.MetaPathFinder):
    """Patches torch, safetensors and h5py, when they are imported.

    Args:
        view: says where files are.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._finding = ""
        self._patches: dict[str, Callable[[ModuleType], None]] = {
            "torch.serialization": self._torch,
            "safetensors": self._safetensors,
            "h5py._hl.files": self._h5py,
        }

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As any finder: of a module that is to be patched, what the other finders say of it."""
        patch = self._patches.get(fullname)
        if patch is None or self._finding == fullname:
            return None
        self._finding = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding = ""
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = then_patch  # type: ignore[method-assign]
        return spec

    def _torch(self, module: ModuleType) -> None:
        core = module.torch._C
        core.PyTorchFileWriter = self._on_name(core.PyTorchFileWriter, 0, self._view.to_write)
        core.PyTorchFileReader = self._on_name(core.PyTorchFileReader, 0, self._view.to_read)

    def _safetensors(self, module: ModuleType) -> None:
        where = {"serialize_file": (1, self._view.to_write), "safe_open": (0, self._view.to_read)}
        for name, (place, mapped) in where.items():
            setattr(module, name, self._on_name(getattr(module, name), place, mapped))

    def _h5py(self, module: ModuleType) -> None:
        native = module.make_fid

        def make_fid(name: Name, mode: str, *args: Any, **options: Any) -> Any:
            writes = mode not in ("r", None)
            text = os.fsdecode(name)
            mapped = self._view.to_write(text) if writes else self._view.to_read(text)
            return native(os.fsencode(mapped), mode, *args, **options)

        module.make_fid = make_fid  # type: ignore[attr-defined]

    @staticmethod
    def _on_name(native: Any, place: int, where: Callable[[Name], str]) -> Callable[..., Any]:
        def mapped(*args: Any, **options: Any) -> Any:
            given = list(args)
            if len(given) > place and isinstance(given[place], (str, bytes, os.PathLike)):
                given[place] = where(given[place])
            elif isinstance(options.get("filename"), (str, os.PathLike)):
                options["filename"] = where(options["filename"])
            return native(*given, **options)

        return mapped
