"""Small jobs for the tests of training, and the plain loop that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import flatout
from flatout.data.randomness import order
from flatout.recipe import Recipe, Save
from flatout.train.terms import Terms

SAMPLES, FEATURES, CLASSES = 150, 12, 3


def quiet(_line: str) -> None:
    """What says nothing, for `say`."""


def data(seed: int = 0, samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels that a small network can learn."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=draw)
    return x, (x @ torch.randn(FEATURES, CLASSES, generator=draw)).argmax(1)


def network(seed: int = 0, *, dropout: float = 0.3, norm: bool = True) -> nn.Sequential:
    """A network with BatchNorm and dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 16),
        nn.BatchNorm1d(16) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(dropout) if dropout else nn.Identity(),
        nn.Linear(16, CLASSES),
    )


def images(samples: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of shape (1, 12, 12) and their labels."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 1, 12, 12, generator=draw)
    return x, torch.randint(0, CLASSES, (samples,), generator=draw)


class Interpreted:
    """In place of a child that compiles: a graph runs operator by operator.

    Attributes:
        graphs: that were asked for; a package's path is the number of one of them.
    """

    graphs: list[Any] = []  # noqa: RUF012

    def __init__(self, graph: Any, digest: str, nice: int, longest_s: float = 600.0) -> None:
        self.graphs.append(graph)
        self.asked = 0

    def done(self) -> Any:
        """The path of the package."""
        return len(self.graphs) - 1

    def close(self) -> None:
        """There is nothing to end."""


def convnet() -> nn.Sequential:
    """A network with convolutions, ReLU before pooling, BatchNorm and dropout on images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(8),
        nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 9, CLASSES),
    )


def plain_fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    batch_size: int = 32,
    epochs: int = 2,
    seed: int = 0,
    loss: Callable[[Any, Any], torch.Tensor] = F.cross_entropy,
    scheduler: Any = None,
    schedule_every: str = "step",
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> list[float]:
    """The loop that a user would write; returns the mean loss of each epoch."""
    means = []
    for epoch in range(epochs):
        model.train()
        at_epoch = torch.from_numpy(order(len(x), seed, epoch))
        total = 0.0
        for start in range(0, len(x), batch_size):
            at = at_epoch[start : start + batch_size]
            optimizer.zero_grad()
            value = loss(model(x[at]), y[at])
            value.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            if clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), clip_value)
            optimizer.step()
            total += value.item() * len(at)
            if scheduler is not None and schedule_every == "step":
                scheduler.step()
        if scheduler is not None and schedule_every == "epoch":
            scheduler.step()
        means.append(total / len(x))
    return means


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether weights and buffers are equal bit for bit."""
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def close(a: nn.Module, b: nn.Module, tolerance: float = 1e-5) -> bool:
    """Whether weights and buffers agree to rounding."""
    ours, theirs = a.state_dict(), b.state_dict()
    return all(torch.allclose(ours[k], theirs[k], atol=tolerance, rtol=tolerance) for k in ours)


def same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    """Whether the state tensors of two optimizers are equal bit for bit."""
    ours, theirs = a.state_dict()["state"], b.state_dict()["state"]
    return ours.keys() == theirs.keys() and all(
        torch.equal(torch.as_tensor(ours[p][k]), torch.as_tensor(theirs[p][k]))
        for p in ours
        for k in ours[p]
        if ours[p][k] is not None
    )


# Terms under which measuring pays in a run of any length.
ALWAYS_TUNED = Terms(short_share=1e6, before_share=1e6, fixed_s=1e6)


def trainer(model: nn.Module, **options: Any) -> flatout.Trainer:
    """A Trainer that promises the plain loop's bits and says nothing."""
    return flatout.Trainer(model, **{"allow": "exact", "say": quiet, **options})


def saving(every: int | None = None, **options: Any) -> Recipe:
    """A Recipe that asks for a checkpoint every so many steps, and decides the rest."""
    return Recipe(save=Save(every=every, **options))


def figures(history: flatout.History) -> list[dict[str, float]]:
    """The logs of the epochs, but for what the clock decides."""
    return [{k: v for k, v in logs.items() if k != "seconds"} for logs in history.epochs]


class StopAt(flatout.Callback):
    """Does something after one step."""

    def __init__(self, step: int, what: Callable[[Any], Any]) -> None:
        self.step, self.what = step, what

    def on_step(self, state: Any) -> None:
        if state.step == self.step:
            self.what(state)
