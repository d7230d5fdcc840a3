"""A pool of threads that goes on where the system starts no more of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from flatout.console import say_once

P = ParamSpec("P")
T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """As its base, for work that may be done twice: what no thread takes, the caller does."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Let a thread do it, or do it now."""
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
    """Say, once, what goes on without a thread or process that could not be started."""
    say_once(f"{what}: {why}; raise the limit of threads and processes (ulimit -u, pids.max)")
