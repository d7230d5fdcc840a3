"""The inputs of a script, observed in a contained run of some seconds on this machine."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from flatout.cache_folder import cache_folder
from flatout.doctor.first_look import first_look
from flatout.errors import FlatoutError, SubmitError
from flatout.observe import opened as access
from flatout.submit.job import SEED
from flatout.submit.job_options import JobOptions

_SECONDS, _STEPS = 10.0, 50
# More files of one folder than these are named by their folder.
_MANY = 20
# The folders of a home for files that packages have fetched; other hidden files are no data.
_FETCHED = (".cache/torch", ".cache/huggingface", ".keras/models", ".keras/datasets")
_SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/lib64", "/bin", "/sbin", "/run")
_CODE = (".py", ".pyc", ".so")


def inputs_seen(asked: JobOptions, root: Path) -> list[str]:
    """Return the files and folders of data that the script opens in its first steps.

    The script runs here for some seconds, with its writes in a scratch folder and no network.

    Raises:
        SubmitError: it fails, or this machine cannot contain it.
    """
    if asked.script == "flatout" and not asked.is_module:
        raise SubmitError("--look looks at a script; a command of Flatout names what it reads")
    seed = str(asked.seeds[0]) if asked.seeds else SEED
    arguments = [argument.replace(SEED, seed) for argument in asked.arguments]
    what = [*(["-m"] if asked.is_module else []), asked.script, *arguments]
    instead = "say what it reads with --input, in place of --look"
    try:
        look = first_look(what, seconds=_SECONDS, steps=_STEPS, opened=True)
    except FlatoutError as error:
        raise SubmitError(f"--look: {error.what}", where=error.where, do=instead) from error
    if look.failed:
        raise SubmitError(
            f"the script failed when it was looked at, with exit code {look.exit_code}",
            where="\n  ".join(["its last words:", *look.output]),
            do=instead,
        )
    return data_of(look.opened, root)


def data_of(opened: Sequence[tuple[str, str]], root: Path) -> list[str]:
    """Return the opened paths that are data: no code, no files of Python, no written files."""
    top = str(root.resolve())
    written: set[str] = set()
    read: dict[str, None] = {}
    listed: set[str] = set()
    for how, path in opened:
        if how == access.WRITTEN:
            written.add(path)
        elif how == access.READ and path not in written and os.path.isfile(path):
            read[path] = None
        elif how == access.LISTED and not _is_above(path, top):
            listed.add(path)
    installed = _installed(top)
    files = [item for item in read if not _is_no_data(item, top, installed)]
    folders = [
        item for item in listed if not (_is_no_data(item, top, installed) or _has_code(item))
    ]
    result = dict.fromkeys(_outermost(item, folders) for item in [*files, *folders])
    many = Counter(os.path.dirname(item) for item in result if item not in listed)
    for folder, count in many.items():
        if count > _MANY and not _is_above(folder, top):
            result = dict.fromkeys(folder if _below(item, folder) else item for item in result)
    return [os.path.relpath(item, top) if _below(item, top) else item for item in result]


def _outermost(path: str, folders: Iterable[str]) -> str:
    around = [folder for folder in folders if path == folder or _below(path, folder)]
    return min(around, key=len, default=path)


def _below(path: str, folder: str) -> bool:
    return path.startswith(f"{folder.rstrip('/')}/")


def _is_above(path: str, root: str) -> bool:
    return path == root or _below(root, path)


def _has_code(folder: str) -> bool:
    try:
        return any(name.endswith(".py") for name in os.listdir(folder))
    except OSError:  # a file, or gone
        return True


def _installed(root: str) -> tuple[str, ...]:
    paths = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, str(cache_folder())}
    paths |= {os.path.realpath(item) for item in sys.path if item}
    return tuple(item for item in {*paths, *_SYSTEM} if not (_is_above(item, root) or item == "/"))


def _is_no_data(path: str, root: str, installed: tuple[str, ...]) -> bool:
    if any(path == item or _below(path, item) for item in installed):
        return True
    home = str(Path.home())
    hidden = _below(path, home) and os.path.relpath(path, home).startswith(".")
    is_fetched = any(_below(path, f"{home}/{item}") for item in _FETCHED)
    is_hidden = hidden and not is_fetched and not _below(path, root)
    return is_hidden or path.endswith(_CODE) or "/__pycache__" in path
