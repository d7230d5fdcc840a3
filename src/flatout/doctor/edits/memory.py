"""Runs the user's code with edits that are made in memory, without changing its files."""

from __future__ import annotations

import io
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import IO, Any

from flatout.doctor.edits.source import Source, by_file
from flatout.doctor.finding import Edit
from flatout.hooks import when_imported

_edits: tuple[Edit, ...] = ()
_edited: dict[str, Source] = {}
"""Edited text of each file, by the file's real path."""


def install(edits: Iterable[Edit]) -> None:
    """Compile the script that is run, and modules that are imported from now on, with edits.

    A script is run by `flatout.observe.run_script.run`, or by `runpy`. The edits also hold in
    processes that multiprocessing starts. For edited files, compiled files (`__pycache__`) are
    neither read nor written, and tracebacks show the edited lines.

    Args:
        edits: edits to make in addition to those installed before.

    Raises:
        FlatoutError: a line differs from what its edit expects, two edits change the same words,
            or the result is no valid Python. Then no edit is installed.
    """
    global _edits
    every = (*_edits, *(edit for edit in edits if edit not in _edits))
    files = by_file(every)
    edited = {os.path.realpath(f): Source.read(f).with_edits(some) for f, some in files.items()}
    if edited and not _edited:
        _open_edited()
        sys.meta_path.insert(0, _FINDER)
        when_imported("multiprocessing.spawn", _hand_on)
    _edits = every
    _edited.update(edited)


def _read(path: str) -> bytes | None:
    source = _edited.get(os.path.realpath(path))
    if source is None:
        return None
    lines = [line.rstrip("\r\n") + "\n" for line in source.lines]
    # linecache never drops an entry that has no time of change.
    linecache.cache[path] = (len(source.text), None, lines, path)
    return source.encode()


def _open_edited() -> None:
    original = io.open_code

    def open_code(path: str) -> IO[bytes]:
        data = _read(path)
        return original(path) if data is None else io.BytesIO(data)

    io.open_code = open_code


class _WithEdits(MetaPathFinder):
    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        if name in self._searching or name.rpartition(".")[2] not in map(_module, _edited):
            return None
        self._searching.add(name)  # other finders may ask all finders, and so this one again
        try:
            finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
            specs = (finder.find_spec(name, path, target) for finder in finders)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._searching.discard(name)
        if spec is not None:
            _change_loader(spec)
        return spec


_FINDER = _WithEdits()


def _module(file: str) -> str:
    folder, name = os.path.split(file)
    return os.path.basename(folder) if name == "__init__.py" else name.partition(".")[0]


def _change_loader(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    origin = spec.origin
    is_source = isinstance(loader, SourceFileLoader)
    if not is_source or origin is None or os.path.realpath(origin) not in _edited:
        return
    read = loader.get_data

    def get_data(path: str) -> bytes:
        data = _read(path)
        return bytes(read(path)) if data is None else data

    def path_stats(path: str) -> dict[str, Any]:
        raise OSError("it has no compiled file")

    loader.get_data = get_data
    loader.path_stats = path_stats


def _hand_on(spawn: Any) -> None:
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "flatout": _Installed()}

    spawn.get_preparation_data = get_preparation_data


class _Installed:
    """Object that installs the edits when it is unpickled, before the script is imported."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[tuple[Edit, ...]]]:
        return install, (_edits,)
