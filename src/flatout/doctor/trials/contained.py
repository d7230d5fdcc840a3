"""First actions of every Python process of a trial: redirect and guard writes, end with its parent.

at_start/sitecustomize.py, which is on PYTHONPATH, calls this module: also in spawned workers, and
in ranks that torchrun starts. The supervisor passes the settings in the environment.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flatout.processes import die_with_parent

# Variable with JSON: folder, temporary, passes and whether files are redirected.
VARIABLE = "FLATOUT_TRIAL"
# Name of the file in the folder for temporary files with JSON lines: the refused actions.
REFUSED = "refused"


def begin() -> None:
    """Contain this process as its environment variables describe."""
    variable = os.environ.get(VARIABLE)
    if variable is None:
        return
    from pathlib import Path

    from flatout.doctor.trials import guard

    how = json.loads(variable)
    writable = None
    if how["is_redirected"]:
        from flatout.doctor.trials import redirect
        from flatout.doctor.trials.view import View

        redirect.install(View(Path(how["folder"]), how["passes"]))
        kernels = ("/dev", "/proc", "/sys")
        writable = (os.path.realpath(how["folder"]), *how["passes"], *kernels)
    else:
        _move_folders_by_copy()
    guard.install(os.path.join(how["temporary"], REFUSED), writable)
    _end_forks_too()


def _move_folders_by_copy() -> None:
    import shutil

    def on_move(native: Callable[..., None]) -> Callable[..., None]:
        def move(src: Any, dst: Any, **options: Any) -> None:
            try:
                native(src, dst, **options)
            except OSError as error:
                if error.errno != errno.EXDEV or not os.path.isdir(src):
                    raise
                with suppress(FileNotFoundError):
                    os.rmdir(dst)  # an empty folder may exist there
                shutil.copytree(src, dst, symlinks=True)
                shutil.rmtree(src)

        return move

    os.rename, os.replace = on_move(os.rename), on_move(os.replace)


def _end_forks_too() -> None:
    by_main = [False]

    def before() -> None:
        # The signal comes when the forking thread ends, not only when its process ends.
        by_main[0] = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if by_main[0]:
            die_with_parent()

    os.register_at_fork(before=before, after_in_child=in_child)
