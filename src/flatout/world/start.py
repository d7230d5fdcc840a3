"""Runs a script as one rank: `python -m flatout.world.start script.py args`.

Two checks are added to the script. An optimizer step in a script whose ranks never met is stopped.
If several ranks fail, only the one that failed first prints its error.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from flatout.console import say
from flatout.errors import FlatoutError, WorldError
from flatout.processes import die_with_parent
from flatout.world.dropped import is_any_dropped
from flatout.world.place import STARTED_BY, place
from flatout.world.world import LostRank, is_first_to_fail

# Seconds that a rank waits after it has lost another one, so that the other one prints and ends
# first. Then the launcher ends this one.
POLITE_S = 20.0
_LOOK_EVERY_S = 0.1
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def main(arguments: list[str], run: Callable[[list[str]], None] | None = None) -> None:
    """Run a script, or after -m a module, as `python` would."""
    if place().world_size > 1:
        end_with_parent()
        _watch_optimizers()
        sys.excepthook = _report_failure
    try:
        (run or _run)(arguments)
    except LostRank as lost:
        until = time.monotonic() + POLITE_S
        while not (lost.is_reported or is_any_dropped()) and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
        say(f"rank {place().rank}: {lost.what}")
        raise


def _run(arguments: list[str]) -> None:
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    from pathlib import Path

    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def end_with_parent() -> None:
    """Let the system kill this rank when the agent that started it is killed.

    No process would watch the rank any more, and a restarted job must not meet it: the last
    checkpoint holds.
    """
    agent = os.environ.get(STARTED_BY, str(os.getppid()))
    die_with_parent(int(agent))


def _watch_optimizers() -> None:
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def check_joined(optimizer: Any, args: Any, kwargs: Any) -> None:
        handle.remove()
        if not dist.is_initialized():
            raise WorldError(
                f"{place()}, but the script never joined the others: each would train a model of "
                "its own",
                do="train with flatout.Trainer or flatout.Loop, call "
                "torch.distributed.init_process_group, or run it on one device",
            )

    handle = register_optimizer_step_pre_hook(check_joined)


def _report_failure(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    here = place()
    who = f"rank {here.rank} of {here.world_size}"
    who += f", node {here.node} of {here.nodes}" if here.nodes > 1 else ""
    if is_first_to_fail():
        say(f"{who} has failed:")
        trace = _of_script(error, trace)
        sys.__excepthook__(kind, error.with_traceback(trace), trace)
    else:
        words = str(error).split("\n")[0]
        say(f"{who} has failed as well: {kind.__name__}: {words}")


def _of_script(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    steps: list[TracebackType] = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    files = [step.tb_frame.f_code.co_filename for step in steps]
    own = [n for n, file in enumerate(files) if _is_of_script(file)]
    if not own:
        return steps[0] if steps else None
    is_first = error.__suppress_context__ or error.__context__ is None
    is_own_report = isinstance(error, FlatoutError) and is_first and error.__cause__ is None
    result = None
    for step in reversed(steps[own[0] : own[-1] + 1 if is_own_report else None]):
        result = TracebackType(result, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return result


def _is_of_script(file: str) -> bool:
    between = (f"{os.sep}torch{os.sep}", f"{os.sep}contextlib.py")
    return not (file.startswith((_PACKAGE, "<frozen")) or any(part in file for part in between))


if __name__ == "__main__":
    main(sys.argv[1:])
