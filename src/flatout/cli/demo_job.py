"""The job of `flatout demo`: its model, its schedule, and the loop that most people write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from flatout.report import JobResult

BATCH_SIZE = 64
PEAK_LR = 3e-3


class ConvNet(nn.Module):
    """Three 3x3 convolutions and two dense layers."""

    def __init__(self, classes: int = 10, height: int = 28, width: int = 28) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1)
        self.dense1 = nn.Linear(64 * (height // 4) * (width // 4), 64)
        self.dense2 = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of shape (samples, classes) for images of shape (samples, 1, h, w)."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.conv3(x))
        x = F.relu(self.dense1(torch.flatten(x, 1)))
        return self.dense2(x)  # type: ignore[no-any-return]


def schedule(steps: int) -> Callable[[torch.optim.Optimizer], OneCycleLR]:
    """Return a function that makes a 1cycle learning-rate schedule for `steps` steps (L. Smith)."""
    return partial(OneCycleLR, max_lr=PEAK_LR, total_steps=steps)


def train_plainly(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    epochs: int,
    most_s: float,
    report: Callable[[int, float], None],
) -> JobResult:
    """Train as most scripts do: a DataLoader that shuffles, Adam, fp32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    _warm_up(model, train, device)
    began = perf_counter()
    loader = DataLoader(TensorDataset(*train), batch_size=BATCH_SIZE, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = schedule(epochs * len(loader))(optimizer)
    times: list[float] = []
    accuracy: float | None = None
    for epoch in range(epochs):
        for seconds in _steps(model, loader, optimizer, scheduler, device):
            times.append(seconds)
            if perf_counter() - began > most_s:
                break
        if len(times) < (epoch + 1) * len(loader):
            break
        accuracy = _accuracy(model, test, device)
        report(epoch + 1, accuracy)
    return JobResult(
        name="plain loop",
        images_per_s=BATCH_SIZE / median(times),
        step_ms=median(times) * 1e3,
        step_p90_ms=sorted(times)[9 * len(times) // 10] * 1e3,
        epochs=len(times) / len(loader),
        seconds=perf_counter() - began,
        accuracy=accuracy if len(times) == epochs * len(loader) else None,
    )


def _steps(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, ...]],
    optimizer: torch.optim.Optimizer,
    scheduler: OneCycleLR,
    device: torch.device,
) -> Iterator[float]:
    """Train for an epoch; yield the seconds from each step to the next."""
    model.train()
    total = 0.0
    began = perf_counter()
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        total += loss.item() * len(labels)
        end = perf_counter()
        yield end - began
        began = end


def _accuracy(model: nn.Module, test: tuple[Tensor, Tensor], device: torch.device) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for inputs, labels in DataLoader(TensorDataset(*test), batch_size=256):
            right += int((model(inputs.to(device)).argmax(1) == labels.to(device)).sum())
    return right / len(test[1])


def _warm_up(model: nn.Module, train: tuple[Tensor, Tensor], device: torch.device) -> None:
    """Let torch start its threads and choose its kernels, which is no part of either loop."""
    images, labels = (part[:BATCH_SIZE].to(device) for part in train)
    F.cross_entropy(deepcopy(model)(images), labels).backward()  # type: ignore[no-untyped-call]
