"""Plain PyTorch loop, whose results are compared with the jobs of torch models."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from combinations.inputs import (
    CLASS_WEIGHT,
    EPOCHS,
    held_out,
    inputs_of,
    plain_batches,
    targets_of,
)
from combinations.models import torch_model

LR, MOMENTUM, DELTA = 0.05, 0.9, 50.0


def train(case: Any, model: nn.Module | None = None) -> dict[str, Any]:
    """Train with the same settings as Flatout, and return the values to compare."""
    model = torch_model(case) if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, LR, momentum=MOMENTUM)
    result: dict[str, Any] = {"loss": [], "val_loss": [], "rates": []}
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.3, patience=1, threshold=DELTA, threshold_mode="abs"
    )
    best = None
    for epoch in range(EPOCHS):
        model.train()
        rate = optimizer.param_groups[0]["lr"]
        total, weight, group = 0.0, 0.0, []
        batches = list(plain_batches(case, epoch))
        for number, batch in enumerate(batches, 1):
            group.append(batch)
            if len(group) < case.accumulate and number < len(batches):
                continue
            found = [step_loss(case, model, *one) for one in group]
            weights = sum(float(w) for _, w in found)
            optimizer.zero_grad()
            for value, _ in found:
                (value / weights).backward()
            optimizer.step()
            total += sum(float(value) for value, _ in found)
            weight += weights
            group = []
        result["loss"].append(total / weight)
        figure = result["loss"][-1]
        if case.validation != "none":
            figure = evaluate(case, model)
            result["val_loss"].append(figure)
        result["rates"].append(rate)
        if case.callbacks == "plateau":
            plateau.step(figure)
        if case.callbacks == "early":
            if best is None or figure < best[0] - DELTA:
                best = figure, epoch, deepcopy(model.state_dict())
            elif epoch - best[1] >= 2:
                break
    if case.callbacks == "early":
        model.load_state_dict(best[2])
    return result | after(case, model)


def after(case: Any, model: nn.Module) -> dict[str, Any]:
    """Return a trained model's values to compare."""
    x = torch.from_numpy(held_out()[0])
    return {
        "weights": weights_of(model),
        "evaluate": evaluate(case, model),
        "predict": outputs(case, model, x),
    }


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the weights by name, without the number in a Keras model's name."""
    named = getattr(model, "weights", None)
    if named is not None:
        return {one.path.partition("/")[2]: one.value.detach().clone() for one in named}
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def outputs(case: Any, model: nn.Module, x: torch.Tensor) -> Any:
    """Return the model's outputs in evaluation mode."""
    was = model.training
    model.eval()
    with torch.no_grad(), autocast(case):
        found = call(case, model, x)
    model.train(was)
    if isinstance(found, dict):
        return {name: value.float() for name, value in found.items()}
    return found.float()


def evaluate(case: Any, model: nn.Module) -> float:
    """Return the mean loss of the held-out samples, without class weights."""
    x, y, w = (torch.from_numpy(one) for one in held_out())
    found = outputs(case, model, x)
    loss = each_loss(case, found, targets_of(case, x, y))
    w = w if case.weights == "sample" and case.validation != "steps" else torch.ones_like(w)
    return float((loss * w).sum() / w.sum())


def autocast(case: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16")


def call(case: Any, model: nn.Module, x: torch.Tensor) -> Any:
    inputs = inputs_of(case, x)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def each_loss(case: Any, found: Any, targets: Any) -> torch.Tensor:
    """Return a loss for each sample."""
    if case.model == "two":
        kind = nn.functional.cross_entropy(found["kind"].float(), targets["kind"], reduction="none")
        size = nn.functional.mse_loss(found["size"].float(), targets["size"], reduction="none")
        return kind + 0.5 * size[:, 0]
    return nn.functional.cross_entropy(found.float(), targets, reduction="none")


def step_loss(case: Any, model: nn.Module, x: Any, y: Any, w: Any) -> tuple[torch.Tensor, float]:
    """Return the sum of a batch's weighted losses, and the sum of the weights."""
    x, y, w = (torch.from_numpy(one) for one in (x, y, w))
    with autocast(case):
        found = call(case, model, x)
        loss = each_loss(case, found, targets_of(case, x, y))
    if case.weights == "none":
        return loss.sum(), len(loss)
    if case.weights == "class":
        w = torch.tensor([CLASS_WEIGHT[int(label)] for label in y])
    return (loss * w).sum(), float(w.sum())
