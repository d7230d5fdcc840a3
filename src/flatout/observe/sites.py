"""Search for the line of the user's code that led to a call."""

from __future__ import annotations

import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import CodeType, FrameType

from flatout.observe.observation import Site


def _installed_folders() -> list[str]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(site.getsitepackages())
    folders.add(site.getusersitepackages())
    # Folders that a .pth file adds, as where one environment extends another.
    folders.update(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    folders.add(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # Flatout itself
    return sorted({os.path.realpath(path) + os.sep for path in folders}, key=len, reverse=True)


_INSTALLED = _installed_folders()
_home = ""
_named: Callable[[str], str] = str


def set_home(folder: str) -> None:
    """Set the script's folder, whose files are the user's even within an installed package."""
    global _home
    _home = os.path.realpath(folder) + os.sep
    is_users.cache_clear()


def name_files(named: Callable[[str], str]) -> None:
    """Set the function that gives files their names in Sites, such as a notebook's cells."""
    global _named
    _named = named


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Return whether a file, as its code names it, is the user's and not an installed package's."""
    if file.startswith("<"):
        return file.startswith(("<ipython", "<stdin"))
    real = os.path.realpath(file)
    inside = next((folder for folder in _INSTALLED if real.startswith(folder)), "")
    return not inside or (real.startswith(_home) and len(_home) > len(inside))


def site_of(frame: FrameType | None, outermost: str = "") -> Site | None:
    """Return the user's line in or above this frame, without its code; None without one."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if outermost and frame.f_globals.get("__name__") == outermost:
            return None
        frame = frame.f_back
    return None if frame is None else Site(frame.f_code.co_filename, line_of(frame))


def line_of(frame: FrameType) -> int:
    """Return the line that a frame is at.

    A frame of another thread may be between two lines for a moment. Then this is the first line of
    its function.
    """
    return frame.f_lineno or frame.f_code.co_firstlineno


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame that runs the user's code, from this frame outwards, or None."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def site_of_code(code: CodeType | None) -> Site | None:
    """Return the first line of a user's function; None for other functions."""
    if code is None or not is_users(code.co_filename):
        return None
    return Site(code.co_filename, code.co_firstlineno)


def read(site: Site) -> Site:
    """Return the Site with its text of code, which hooks do not read since files are slow."""
    code = linecache.getline(site.file, site.line).strip()
    return replace(site, file=_named(site.file), code=code)


def here(depth: int = 0) -> Site | None:
    """Return the user's line that led to the caller of this function."""
    return site_of(sys._getframe(depth + 1))


def packages_above() -> set[str]:
    """Return the top-level packages whose code the calling thread is running."""
    packages = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith("flatout.observe"):
            packages.add(name.partition(".")[0].removeprefix("pytorch_"))
        frame = frame.f_back
    return packages
