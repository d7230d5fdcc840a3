"""Execution of a script as by `python`: arguments, `__main__`, errors."""

from __future__ import annotations

import io
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType

from flatout.observe.sites import set_home

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Folders of Flatout's code that runs scripts: its frames lie above those of a script.
_OURS = tuple(
    os.path.join(_PACKAGE, room) + os.sep for room in ("observe", "cures", "world", "doctor")
)


def compiled(source: bytes, path: str) -> CodeType:
    """Return a script's code as Python compiles it."""
    return compile(source, path, "exec", dont_inherit=True)


def run(arguments: list[str], compiled: Callable[[bytes, str], CodeType] = compiled) -> None:
    """Run a script, or after -m a module, as `__main__`, with the rest as its arguments.

    Args:
        arguments: the script or module, and its arguments.
        compiled: function that compiles a script's source.

    Raises:
        BaseException: any exception of the script.
    """
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        set_home(os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    path = os.path.abspath(arguments[0])  # Python sets __file__ to the absolute path
    folder = os.path.dirname(os.path.realpath(path))
    sys.path[0] = folder
    set_home(folder)
    if os.path.isdir(path) or not path.endswith(".py"):
        runpy.run_path(path, run_name="__main__")
        return
    _run_file(path, compiled)


def _run_file(path: str, compiled: Callable[[bytes, str], CodeType]) -> None:
    # The module stays in sys.modules: objects pickled by name for other processes, and exit
    # handlers, find the script's names in it.
    with io.open_code(path) as file:
        code = compiled(file.read(), path)
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__dict__["__builtins__"] = __builtins__
    main.__dict__["__cached__"] = None
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def show_as_python_does() -> None:
    """Remove frames that are not the script's from its tracebacks."""

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error.with_traceback(of_script(trace)), of_script(trace))

    sys.excepthook = tell


def of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the script; None without such a part."""
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def traceback_of(error: BaseException) -> str:
    """Return the error as Python prints it, without our frames."""
    return "".join(traceback.format_exception(type(error), error, of_script(error.__traceback__)))


def _is_ours(file: str) -> bool:
    return file.startswith(("<frozen", *_OURS)) or os.path.basename(file) == "runpy.py"
