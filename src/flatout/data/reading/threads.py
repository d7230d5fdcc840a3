"""A pool of threads that continues if the system cannot start more threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from flatout.console import say_once

P = ParamSpec("P")
T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose caller does the work itself if no thread can be started.

    If a thread cannot be started, work may run twice: by the caller, and later by a thread.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Let a thread do the work, or do it now."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            say_fewer(str(error), "files are read by fewer threads")
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


def say_fewer(why: str, what: str) -> None:
    """Print, once, that work continues without a thread or process that could not be started."""
    say_once(f"{what}: {why}; raise the limit of threads and processes (ulimit -u, pids.max)")
