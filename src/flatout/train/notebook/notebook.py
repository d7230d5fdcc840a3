"""`Trainer(model, devices=2).fit(...)` in a notebook: the fit runs on ranks spawned for it.

Model, optimizer, data and callbacks go to the ranks in a file. The changes made by training are
copied back into the notebook's own objects. Ranks are fresh processes: a fork of a process that has
computed would hang in libgomp.
"""

from __future__ import annotations

import os
import pickle
import select
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import torch

from flatout.errors import ModelError, WorldError
from flatout.models import load_weights
from flatout.recipe import Recipe, ResolvedRecipe, effective
from flatout.train.history import History
from flatout.train.model_ids import make_room
from flatout.train.notebook.notebook_files import pack, unpack_result
from flatout.train.signals import is_interactive
from flatout.train.state import FittingTrainer
from flatout.world import Nodes, check_devices, place

F = TypeVar("F", bound=Callable[..., Any])

# Maximum number of restarts of the ranks after a rank was killed.
_RESTARTS = 3
# Number of last characters of a killed rank's output that are reported.
_LAST_CHARACTERS = 2_000


def check_ranks_asked(devices: int, recipe: Recipe | ResolvedRecipe | None) -> None:
    """Refuse a number of ranks that is not available here."""
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ModelError(f"devices is a number of ranks from 1, found {devices!r}")
    if devices == 1:
        return
    here = place()
    if here.world_size > 1:
        if devices == here.local_world_size:
            return
        raise WorldError(
            f"devices={devices}, but {here.local_world_size} ranks were started on this node",
            where=str(here),
            do=f"start {devices} with flatout run --devices {devices}, or leave devices out: the "
            "Trainer takes the ranks that are there",
        )
    if not is_interactive():
        script = shlex.join(sys.argv) if sys.argv and sys.argv[0] not in ("", "-c") else "script.py"
        raise WorldError(
            f"devices={devices} in a script that runs as one process: Flatout does not start "
            "scripts again unasked",
            do=f"flatout run --devices {devices} {script}",
        )
    check_devices(devices, effective(recipe).world.device)


def on_ranks(fit: F) -> F:
    """Let a fit in a notebook run on its own ranks if the Trainer was given several devices."""

    @wraps(fit)
    def fit_here_or_there(trainer: FittingTrainer, *args: Any, **kwargs: Any) -> History:
        if trainer.devices == 1 or place().world_size > 1:
            history: History = fit(trainer, *args, **kwargs)
            return history
        return _fit_there(trainer, args, kwargs)

    return cast(F, fit_here_or_there)


def _fit_there(trainer: FittingTrainer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> History:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from flatout.world import Rendezvous, first_failure, run_ranks

    strategy = trainer.loop.asked.recipe.world.strategy
    if strategy in ("fsdp", "staged"):
        raise WorldError(
            f"with world.strategy={strategy} each rank has a part of the optimizer's state, and a "
            "notebook gets back the part of one rank only",
            do="put the training into a script and start it with flatout run --devices "
            f"{trainer.devices}, or take world.strategy=ddp",
        )
    given = signature(type(trainer).fit).bind(trainer, *args, **kwargs).arguments
    # Callbacks are iterated over twice, so an iterator is copied into a list.
    kwargs = {name: value for name, value in given.items() if name != "self"}
    kwargs["callbacks"] = list(kwargs.get("callbacks") or ())
    nodes = Nodes(ranks=trainer.devices)
    command = [sys.executable, "-u", "-m", "flatout.train.notebook.notebook_rank"]
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        pack(folder, trainer, (), kwargs)
        meeting = Rendezvous(nodes, {}, wait_s=60, silent_s=60)
        try:
            with _output(folder) as logs:
                result = run_ranks([*command, name], meeting, _RESTARTS, logs)
        except SignalException as stop:
            _take_back(folder, trainer, kwargs["callbacks"])
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + int(stop.sigval)) from None
        finished = _take_back(folder, trainer, kwargs["callbacks"])
        if result.is_failed():
            rank, failure = first_failure(result.failures)
            raise _error(folder, rank, failure.exitcode)
    assert finished
    assert trainer.history is not None
    return trainer.history


@torch.no_grad()
def _take_back(folder: Path, trainer: FittingTrainer, callbacks: list[Any]) -> bool:
    """Copy the result of training into the notebook's own objects; return whether there is one."""
    result = unpack_result(folder, trainer)
    if result is None:
        return False
    if (known := result["signature"]) is not None and known.ids is not None:
        make_room(trainer.model, known.ids, "what the ranks have trained", trainer.optimizer)
    load_weights(trainer.model, result["weights"])
    trainer.optimizer.load_state_dict(result["optimizer"])
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(result["scheduler"])
    for callback, theirs in zip(callbacks, result["callbacks"], strict=True):
        if theirs is not None:
            vars(callback).update(theirs)
    trainer.get_ready()
    trainer.history = result["history"]
    trainer.signature = result["signature"]
    if result["recipe"] is not None:
        trainer.loop.follow(trainer.model, trainer.optimizer, result["recipe"])
    return True


class _RankTraceback(Exception):
    """The traceback of a rank, shown as the cause of that rank's error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _error(folder: Path, rank: int, code: int) -> BaseException:
    with suppress(OSError):
        text, pickled = pickle.loads((folder / f"error-{rank}").read_bytes())
        try:
            error = pickle.loads(pickled)
        except Exception:  # the class cannot be built from its arguments
            error = WorldError(text.strip().rpartition("\n")[2])
        error.__cause__ = _RankTraceback(text)
        return error if isinstance(error, BaseException) else WorldError(text)
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    last = ""  # the output of the first rank was already shown
    with suppress(OSError):
        last = (
            ""
            if rank == 0
            else (folder / f"stderr-{rank}").read_text(errors="replace")[-_LAST_CHARACTERS:].strip()
        )
    return WorldError(f"rank {rank} {ended}; all ranks have ended", where=last or None)


@contextmanager
def _output(folder: Path) -> Iterator[Any]:
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class Logs(LogsSpecs):
        root_log_dir = str(folder)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            for env in envs.values():
                env["TORCHELASTIC_ERROR_FILE"] = ""
            others = range(1, len(envs))
            return LogsDest(
                stdouts={0: str(folder / "stdout-0")} | dict.fromkeys(others, os.devnull),
                stderrs={rank: str(folder / f"stderr-{rank}") for rank in envs},
                error_files=dict.fromkeys(envs, os.devnull),
            )

    over = threading.Event()
    showing = []
    for name, stream in (("stdout-0", sys.stdout), ("stderr-0", sys.stderr)):
        os.mkfifo(folder / name)
        # Opened for writing too, so that reading does not end when a writer closes it.
        pipe = os.open(folder / name, os.O_RDWR)
        showing.append(threading.Thread(target=_show, args=(pipe, stream, over), daemon=True))
        showing[-1].start()
    try:
        yield Logs()
    finally:
        over.set()
        for thread in showing:
            thread.join()


def _show(pipe: int, stream: TextIO, over: threading.Event) -> None:
    while True:
        ending = over.is_set()
        if select.select([pipe], [], [], 0.05)[0]:
            stream.write(os.read(pipe, 65_536).decode(errors="replace"))
            stream.flush()
        elif ending:
            os.close(pipe)
            return
