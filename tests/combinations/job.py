"""One rank of a case, with Flatout or as the plain loop: it writes its result to a file."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatout
from combinations import keras_models, plain, plain_keras
from combinations.axes import Case
from combinations.calls import count, counted
from combinations.inputs import (
    CLASS_WEIGHT,
    EPOCHS,
    batch_size,
    given,
    held_out,
    inputs_of,
    rows_of,
    samples,
    validation,
)
from combinations.models import torch_model
from flatout.errors import FlatoutError
from flatout.recipe import Recipe
from flatout.train.callbacks import BestCheckpoint


def main(name: str, folder: str, number: int) -> None:
    """Run one rank of a case; rank -1 is the plain loop."""
    torch.set_num_threads(1)
    case = Case.parse(name)
    calls = Path(folder) / f"calls{number}"
    calls.mkdir()
    os.environ["CALLS"] = str(calls)
    result = reference(case) if number < 0 else ran(case, Path(folder), number)
    torch.save(result, f"{folder}/result{number}.pt")


def reference(case: Case) -> dict[str, Any]:
    """Return the result of the plain loop."""
    try:
        return learned(case)
    except RuntimeError as error:
        if (case.model, case.precision) != ("lstm", "bf16"):
            raise
        return {"error": str(error)}  # the CPU lacks the kernel


def learned(case: Case) -> dict[str, Any]:
    if case.is_compiled:
        return plain_keras.train(case)
    if case.is_keras:
        return plain.train(case, keras_models.keras_model(case))
    return plain.train(case)


def ran(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    """Return the result, or the error with its kind and whether training had begun."""
    models: list[Any] = []
    try:
        return trained(case, folder, rank, models)
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {error}",
            "named": isinstance(error, FlatoutError),
            "begun": any(has_moved(*one) for one in models),
            "trace": traceback.format_exc(),
        }


def has_moved(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    """Return whether a step was made, so that weights have changed."""
    now = dict(model.named_parameters())
    return any(
        type(now.get(name)) is nn.Parameter and not torch.equal(now[name], value)
        for name, value in before.items()
    )


class Watch(flatout.Callback):
    """Record learning rates of epochs, and events if the case needs them."""

    def __init__(self, case: Case) -> None:
        self.rates, self.events = [], []
        self.every = 1 if case.callbacks == "own" else 10**9

    def on_fit_start(self, state):
        self.events.append("fit_start")

    def on_epoch_start(self, state):
        self.rates.append(state.learning_rate)
        self.events.append("epoch_start")

    def on_step(self, state):
        self.events.append("step")

    def on_evaluate_end(self, state):
        self.events.append("evaluate_end")

    def on_epoch_end(self, state):
        self.events.append("epoch_end")

    def on_fit_end(self, state):
        self.events.append("fit_end")


def trained(case: Case, folder: Path, rank: int, models: list[Any]) -> dict[str, Any]:
    run = folder / "run" if case.resume != "none" or case.callbacks == "checkpoint" else None
    if case.resume != "none":
        epochs = 2 if case.resume == "between" else 3
        trainer, _ = fitted(case, folder, rank, run, models, epochs=epochs)
        trainer.world().wait()
    resume: Any = case.resume != "none"
    if case.resume == "middle":
        updates = -(-len(samples(case)[0]) // batch_size(case))
        updates = -(-updates // case.accumulate)
        found = sorted(path.name for path in (folder / "run/checkpoints").iterdir())
        resume = found[found.index(f"step-{2 * updates + max(1, updates // 2):09d}")]
    trainer, watch = fitted(case, folder, rank, run, models, resume=resume)
    history = trainer.history
    x, y, w = (torch.from_numpy(one) for one in held_out())
    size = batch_size(case)
    weighted = {"sample_weight": w} if case.weights == "sample" else {}
    events = list(watch.events)
    calls = counted()
    evaluated = trainer.evaluate(
        *rows_of(case, x, y, w)[:2], batch_size=size, verbose=0, **weighted
    )
    model = trainer.model
    found = plain.weights_of(model)
    result = {
        "loss": list(history.history["loss"]),
        "val_loss": list(history.history.get("val_loss", [])),
        "rates": watch.rates,
        "events": events,
        "names": sorted(history.history),
        "weights": found,
        "evaluate": evaluated["loss"],
        "predict": predicted(trainer, case, x),
        "calls": calls,
    }
    if not case.is_compiled:
        result["own"] = plain.after(case, model)
    return result


def predicted(trainer: flatout.Trainer, case: Case, x: torch.Tensor) -> Any:
    found = trainer.predict(inputs_of(case, x), verbose=0)
    if isinstance(found, dict):
        return {name: torch.as_tensor(value).float() for name, value in found.items()}
    return torch.as_tensor(found).float()


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "staged": {"strategy": "staged", "batch_statistics": "per_micro_batch"},
    "parameter_server": {"strategy": "parameter_server"},
    "async": {"strategy": "parameter_server", "staleness": 1},
    # The mean of the ranks' steps equals a step with the mean gradient.
    "local_sgd": {"strategy": "local_sgd", "sync_every": 1},
}


def recipe_of(case: Case) -> Recipe:
    sections: dict[str, Any] = {
        "world": STRATEGIES[case.strategy] | {"timeout": 60},
        "compute": {"precision": case.precision},
        "process": {"threads": 1},
    }
    if case.resume == "middle":
        sections["save"] = {"every": 1, "keep_last": 100}
    if case.kept == "features":
        sections["input"] = {"features": "memory"}
    if case.kept == "tables":
        sections["compute"]["touched_rows"] = "on"
    return Recipe(**sections)


def fitted(
    case: Case,
    folder: Path,
    rank: int,
    run: Path | None,
    models: list[Any],
    *,
    epochs: int = EPOCHS,
    resume: Any = False,
) -> tuple[flatout.Trainer, Any]:
    options: dict[str, Any] = {
        "recipe": recipe_of(case),
        "allow": "exact",
        "accumulate": case.accumulate,
        "run": run,
        "say": lambda line: None,
    }
    watch: Any = Watch(case)
    if case.is_compiled:
        model = keras_models.compiled(case)
        watch = keras_models.watch(case)
        callbacks = [*keras_models.callbacks(case, folder, rank), watch]
    else:
        model, objective = objective_of(case)
        options |= objective
        callbacks = [*torch_callbacks(case), watch]
    models.append((model, {n: p.detach().clone() for n, p in model.named_parameters()}))
    trainer = flatout.Trainer(model, **options)
    data = given(case, folder, rank) | validation(case)
    if case.weights == "class":
        data["class_weight"] = CLASS_WEIGHT
    if case.is_compiled:
        data = keras_models.as_keras(case, data)
    trainer.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks, resume=resume)
    return trainer, watch


def objective_of(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model with the Trainer's arguments for loss, optimizer, metrics and schedule."""
    if case.is_keras:
        model: nn.Module = keras_models.keras_model(case)
    else:
        model = torch_model(case)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(weights, plain.LR, momentum=plain.MOMENTUM)
    given: dict[str, Any] = {"optimizer": optimizer}
    if case.model == "two":
        given |= {
            "loss": {"kind": "cross_entropy", "size": "mse"},
            "loss_weights": {"size": 0.5},
            "metrics": {"kind": ["accuracy"]},
        }
    elif case.functions == "own":

        def loss(output, target):
            count("loss")
            each = nn.functional.cross_entropy(output.float(), target, reduction="none")
            return each.sum(), len(each)

        def metric(output, target):
            count("metric")
            return (output.argmax(1) == target).float().mean()

        given |= {"loss": loss, "metrics": {"hits": metric}}
    else:
        given |= {"loss": "cross_entropy", "metrics": ["accuracy"]}
    if case.callbacks == "plateau":
        given["scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.3, patience=1, threshold=plain.DELTA, threshold_mode="abs"
        )
    return model, given


def torch_callbacks(case: Case) -> list[Any]:
    figure = "loss" if case.validation == "none" else "val_loss"
    if case.callbacks == "early":
        return [flatout.EarlyStopping(figure, patience=2, min_delta=plain.DELTA)]
    if case.callbacks == "checkpoint":
        return [BestCheckpoint(figure)]
    return []


def load(folder: str, rank: int) -> dict[str, Any]:
    """Return the result that a rank has written."""
    result: dict[str, Any] = torch.load(f"{folder}/result{rank}.pt", weights_only=False)
    return result
