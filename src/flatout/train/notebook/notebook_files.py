"""Transfer between a notebook and the ranks of its fit, by files in a folder of their own.

Classes and functions that were defined in the notebook are sent with their code. Ranks map large
arrays into memory instead of reading them, so that all ranks share one copy.
"""

from __future__ import annotations

import io
import mmap
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from flatout.atomic_file import atomic_write
from flatout.errors import DataError, FlatoutError
from flatout.models import weights_of
from flatout.train.state import FittingTrainer
from flatout.unhooked import unhooked

# Names of attributes that are not sent, because a Trainer creates them again in each process.
_OWN = ("loop", "_fit", "history")


def pack(
    folder: Path, trainer: FittingTrainer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Write a Trainer and the arguments of its fit."""
    try:
        import cloudpickle
    except ImportError as error:
        raise FlatoutError(
            "what a notebook defines goes to other processes by cloudpickle, which is missing",
            do="pip install 'flatout[notebook]'",
        ) from error
    state = {name: value for name, value in vars(trainer).items() if name not in _OWN}
    job = {
        "kind": type(trainer),
        "state": state,
        # A Keras model is created from its description, with new parameters for the optimizer.
        "parameters": list(trainer.model.parameters()),
        "args": args,
        "kwargs": kwargs,
    }
    (folder / "path").write_bytes(pickle.dumps(sys.path))
    buffers: list[pickle.PickleBuffer] = []
    try:
        with open(folder / "job", "wb") as file, unhooked():
            cloudpickle.dump(job, file, protocol=5, buffer_callback=buffers.append)
    except Exception as error:
        raise DataError(
            f"the fit cannot be sent to other processes: {error}",
            do="give data as arrays, a Dataset or files instead of generators and open files, or "
            "write a script for flatout run --devices",
        ) from error
    sizes = []
    with open(folder / "arrays", "wb") as file:
        for buffer in buffers:
            raw = buffer.raw()
            sizes.append((file.tell(), raw.nbytes))
            file.write(raw)
            file.write(bytes(-file.tell() % 64))  # aligns arrays for numpy
    (folder / "sizes").write_bytes(pickle.dumps(sizes))


def unpack(folder: Path) -> tuple[FittingTrainer, tuple[Any, ...], dict[str, Any]]:
    """Read the Trainer and the arguments of its fit; called in a rank."""
    sys.path[:] = pickle.loads((folder / "path").read_bytes())
    sizes = pickle.loads((folder / "sizes").read_bytes())
    arrays = []
    if sizes:
        with open(folder / "arrays", "rb") as file:
            # A page is copied when this rank writes to it.
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        arrays = [mapped[start : start + size] for start, size in sizes]
    with open(folder / "job", "rb") as file:
        job = pickle.load(file, buffers=arrays)
    trainer: FittingTrainer = object.__new__(job["kind"])
    vars(trainer).update(job["state"])
    _follow_parameters(trainer, job["parameters"])
    trainer.get_ready()
    return trainer, job["args"], job["kwargs"]


def _follow_parameters(trainer: FittingTrainer, sent: list[Any]) -> None:
    """Replace the optimizer's parameters by those of the model that was created here."""
    here = list(trainer.model.parameters())
    if all(own is other for own, other in zip(here, sent, strict=True)):
        return
    new = {id(other): own for own, other in zip(here, sent, strict=True)}
    optimizer = trainer.optimizer
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(p), p) for p in group["params"]]
    moved = [(new.get(id(p), p), state) for p, state in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(moved)


# -- results -------------------------------------------------------------------------------------


def pack_result(folder: Path, trainer: FittingTrainer, callbacks: list[Any]) -> None:
    """Write the results of training, whole or not at all; called in rank 0."""
    scheduler = trainer.scheduler
    result = {
        "weights": {name: tensor.cpu() for name, tensor in weights_of(trainer.model).items()},
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "history": trainer.history,
        "recipe": trainer.resolved,
        "signature": trainer.signature,
    }
    parts: dict[str, Any] = {name: _dumps(value, trainer) for name, value in result.items()}
    parts["callbacks"] = [_dumps_or_say(callback, trainer) for callback in callbacks]
    with atomic_write(folder / "result", "wb") as file:
        file.write(pickle.dumps(parts))


def unpack_result(folder: Path, trainer: FittingTrainer) -> dict[str, Any] | None:
    """Read the results with references to the notebook's own objects; None without any."""
    if not (folder / "result").exists():
        return None
    parts = pickle.loads((folder / "result").read_bytes())
    callbacks = [None if part is None else _loads(part, trainer) for part in parts["callbacks"]]
    del parts["callbacks"]
    return {name: _loads(part, trainer) for name, part in parts.items()} | {"callbacks": callbacks}


def pack_error(folder: Path, rank: int, error: BaseException) -> None:
    """Write the exception that ends a rank, with its traceback."""
    import cloudpickle

    text = "".join(traceback.format_exception(error))
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:
        pickled = b""
    with atomic_write(folder / f"error-{rank}", "wb") as file:
        file.write(pickle.dumps((text, pickled)))


def _dumps_or_say(callback: Any, trainer: FittingTrainer) -> bytes | None:
    try:
        return _dumps(vars(callback), trainer)
    except Exception as error:
        name = type(callback)
        if not name.__module__.startswith("flatout."):
            trainer.loop.say(
                f"the attributes of {name.__qualname__} stay in the rank processes: {error}"
            )
        return None


def _known(trainer: FittingTrainer) -> dict[str, Any]:
    return {
        "trainer": trainer,
        "model": trainer.model,
        "optimizer": trainer.optimizer,
        "scheduler": trainer.scheduler,
    }


def _dumps(value: Any, trainer: FittingTrainer) -> bytes:
    import cloudpickle

    names = {id(value): name for name, value in _known(trainer).items() if value is not None}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> str | None:
            return names.get(id(value))

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _loads(value: bytes, trainer: FittingTrainer) -> Any:
    known = _known(trainer)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: str) -> Any:
            return known[name]

    return Unpickler(io.BytesIO(value)).load()
