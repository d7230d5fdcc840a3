"""script.log_every: the training loop prints and logs only in every Nth step."""

from __future__ import annotations

import atexit
import builtins
import logging
import os
import sys
from threading import get_ident
from typing import Any

from flatout.console import say
from flatout.cures.record import is_on, took
from flatout.cures.steps import ScriptSteps, caller
from flatout.hooks import when_imported, wrap
from flatout.observe import is_users
from flatout.words import counted

FIELD = "script.log_every"


class Log:
    """Skips prints, log records and summaries that come between all steps.

    Not skipped are warnings and errors, prints to files other than standard output, output that is
    rarer than once per step, and output of packages.
    """

    def __init__(self, torch: Any, steps: ScriptSteps) -> None:
        self._steps = steps
        self._every = steps.asked[FIELD]
        self._process = os.getpid()
        self.left_out = 0
        wrap(builtins, "print", "cures", self._print)
        wrap(logging.Logger, "_log", "cures", self._log)
        for name in ("torch.utils.tensorboard.writer", "tensorboardX.writer"):
            when_imported(name, self._hook_summaries)
        atexit.register(self._tell)

    def _is_left_out(self) -> bool:
        if get_ident() != self._steps.thread or not is_on():
            return False
        file, *place = caller()
        if not is_users(file) or not self._steps.is_in_each((FIELD, *place)):
            return False
        took(FIELD, f"a log line every {counted(self._every, 'step')}")
        if self._steps.count % self._every == 0:
            return False
        self.left_out += 1
        return True

    def _print(self, original: Any) -> Any:
        def print_(*values: Any, **options: Any) -> None:
            file = options.get("file")
            if (file is None or file is sys.stdout) and self._is_left_out():
                return
            original(*values, **options)

        return print_

    def _log(self, original: Any) -> Any:
        def log(logger: Any, level: int, *args: Any, **kwargs: Any) -> None:
            if level >= logging.WARNING or not self._is_left_out():
                # One more frame on the stack, so that a record names the right file and line.
                kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
                original(logger, level, *args, **kwargs)

        return log

    def _hook_summaries(self, module: Any) -> None:
        owner = module.SummaryWriter
        for name in [name for name in vars(owner) if name.startswith("add_")]:
            wrap(owner, name, "cures", self._passing)

    def _passing(self, original: Any) -> Any:
        def add(*args: Any, **kwargs: Any) -> Any:
            return None if self._is_left_out() else original(*args, **kwargs)

        return add

    def _tell(self) -> None:
        if self.left_out and os.getpid() == self._process:
            say(
                f"{counted(self.left_out, 'line')} of the script's log left out: each step's, "
                f"but for one in {self._every:,}"
            )
