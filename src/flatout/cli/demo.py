"""`flatout demo`: a tour of a minute on real images, against the loop that most people write."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from flatout.console import say_as_is
from flatout.words import rounded

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.cli.demo_job import ConvNet
    from flatout.data import Arrays
    from flatout.report import JobResult
    from flatout.terminal import Console
    from flatout.train import History, Trainer

_PLAIN_S = 35.0
"""Seconds that the plain loop may take, so that the tour stays within a minute."""


def demo(
    data: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="A folder of IDX files, such as MNIST or Fashion-MNIST, gzip or not. "
            "Default: scikit-learn's handwritten digits.",
        ),
    ] = None,
    epochs: Annotated[
        int | None, Option(min=1, help="Default: 5 with --data, otherwise 20.")
    ] = None,
    run: Annotated[
        Path | None,
        Option(metavar="DIR", help="Where the model and the log go. Default: runs/demo-<time>."),
    ] = None,
    seed: Annotated[int, Option(help="Decides the first weights and the order.")] = 0,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object, all the rest to stderr.")
    ] = False,
) -> None:
    """Train a small ConvNet on real images, as a plain loop and with Flatout, and compare."""
    from flatout.terminal import Console

    out = Console(stderr=as_json, highlight=False)
    folder = run or Path("runs") / time.strftime("demo-%Y-%m-%d-%H%M%S")
    try:
        result = _tour(out, data, epochs or (5 if data else 20), folder, seed)
    except KeyboardInterrupt:
        say_as_is("", "stopped")
        raise typer.Exit(130) from None
    if as_json:
        import json

        from flatout.train import json_safe

        typer.echo(json.dumps(json_safe(result), allow_nan=False))


def _tour(out: Console, data: Path | None, epochs: int, folder: Path, seed: int) -> dict[str, Any]:
    """Train twice, show the comparison, and return it as plain data."""
    from copy import deepcopy

    import torch

    from flatout.cli.demo_job import BATCH_SIZE, ConvNet

    _make(folder)
    train, test = _images(data)
    where = f"IDX files in {data}" if data else "scikit-learn's digits, enlarged"
    out.print(
        f"{where}: {len(train):,} images to train on, {len(test):,} held out\n"
        f"{epochs} epochs in batches of {BATCH_SIZE}",
        markup=False,
        soft_wrap=True,
    )
    images, labels = _tensors(train)
    classes = 1 + max(int(labels.max()), int(_tensors(test)[1].max()))
    torch.manual_seed(seed)
    model = ConvNet(classes, *images.shape[2:])
    # The plain loop comes first: what Flatout sets for the process would make it faster too.
    plain = _train_plainly(out, deepcopy(model), train, test, epochs)
    fast, trainer, history = _train(model, train, test, epochs, folder, seed)
    saved = trainer.save(folder / "model.safetensors")
    _show(out, [plain, fast], history, saved)
    return _as_dict(plain, fast, history, saved, (len(train), len(test)))


def _make(folder: Path) -> None:
    from flatout.errors import FlatoutError

    if (folder / "checkpoints").exists():
        raise FlatoutError(
            "the run folder holds another run",
            where=str(folder),
            do="choose another one with --run",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlatoutError(
            f"the run folder cannot be made: {error.strerror}",
            where=str(folder),
            do="choose another one with --run",
        ) from error


def _images(data: Path | None) -> tuple[Arrays, Arrays]:
    from flatout import data as sources
    from flatout.errors import DataError

    train, test = sources.digits() if data is None else sources.idx_split(data)
    sizes = [tuple(_tensors(part)[0].shape[2:]) for part in (train, test)]
    if sizes[0] != sizes[1] or min(sizes[0]) < 4:
        raise DataError(
            f"expected images of one size from 4x4 up, found {sizes[0]} to train on "
            f"and {sizes[1]} held out",
            where=str(data),
        )
    return train, test


def _tensors(part: Arrays) -> tuple[Tensor, Tensor]:
    images, labels = part.inputs, part.targets
    assert not isinstance(images, tuple | dict)
    assert labels is not None
    assert not isinstance(labels, tuple | dict)
    return images, labels


def _train_plainly(
    out: Console, model: ConvNet, train: Arrays, test: Arrays, epochs: int
) -> JobResult:
    from rich.control import Control
    from rich.segment import ControlType

    from flatout.cli.demo_job import train_plainly

    def report(epoch: int, accuracy: float) -> None:
        say(f"{epoch} of {epochs} epochs  accuracy {accuracy:.4f}")

    def say(words: str) -> None:
        if out.is_terminal:
            out.print(f"plain loop: {words}".ljust(60), end="")
            out.control(Control(ControlType.CARRIAGE_RETURN))

    say("the first epoch ...")
    (images, labels), (held_out, answers) = _tensors(train), _tensors(test)
    job = train_plainly(
        model,
        (images.float() / 255, labels),
        (held_out.float() / 255, answers),
        epochs=epochs,
        most_s=_PLAIN_S,
        report=report,
    )
    out.print(f"plain loop: {rounded(job.epochs)} epochs in {job.seconds:.1f} s".ljust(60))
    if job.accuracy is None:
        out.print(f"  ended after {_PLAIN_S:.0f} s: its speed is compared, its accuracy is not")
    return job


def _train(
    model: ConvNet, train: Arrays, test: Arrays, epochs: int, folder: Path, seed: int
) -> tuple[JobResult, Trainer, History]:
    import flatout
    from flatout.cli.demo_job import BATCH_SIZE, schedule
    from flatout.report import JobResult

    steps = epochs * -(-len(train) // BATCH_SIZE)
    began = time.perf_counter()
    trainer = flatout.Trainer(
        model, metrics=["accuracy"], scheduler=schedule(steps), seed=seed, run=folder
    )
    history = trainer.fit(train, batch_size=BATCH_SIZE, epochs=epochs, validation_data=test)
    seconds = time.perf_counter() - began
    # From one step to the next, as in the plain loop.
    step_ms = history.percentiles()[50] * 1e3 + history.lanes()["idle"]
    job = JobResult(
        name="Flatout",
        images_per_s=BATCH_SIZE / step_ms * 1e3,
        step_ms=step_ms,
        step_p90_ms=history.percentiles()[90] * 1e3,
        epochs=epochs,
        seconds=seconds,
        accuracy=history.epochs[-1]["val_accuracy"],
    )
    return job, trainer, history


def _show(out: Console, jobs: list[JobResult], history: History, saved: Path) -> None:
    from flatout.report import Changes, Comparison, Lanes

    out.print(Comparison(jobs))
    if history.recipe is not None:
        out.print("what auto chose, and what it measured", style="bold")
        out.print(Changes(history.recipe))
    out.print()
    out.print("a step of Flatout", style="bold")
    out.print(Lanes(history.lanes()))
    out.print()
    out.print(f"saved {saved}", soft_wrap=True, markup=False)
    out.print("  plain safetensors; the log and the recipe lie beside it")
    out.print("now yours: flatout doctor train.py")


def _as_dict(
    plain: JobResult, fast: JobResult, history: History, saved: Path, samples: tuple[int, int]
) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "samples": {"train": samples[0], "held_out": samples[1]},
        "jobs": [asdict(plain), asdict(fast)],
        "speed": fast.images_per_s / plain.images_per_s,
        "recipe": history.recipe and history.recipe.summary(),
        "choices": [change._asdict() for change in history.recipe.changes()]
        if history.recipe
        else [],
        "lanes_ms": history.lanes(),
        "model": str(saved),
    }
