"""Steps of all ranks together beside steps of each rank for itself, in pictures.

flatout run --devices 2 examples/sync_and_async.py [FOLDER] [epochs]

1. A ball on a slope: two devices read the same place, and both move the ball when they are done.
2. A small model on digits, with a parameter server that waits for all gradients (sync), and one
   that does not (async), on even ranks and with the last one slowed three times; then async with
   the rate shared out among the ranks, whose steps add up.

FOLDER (sync_and_async) gets ball.png, loss.png and staleness.png.
"""

import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch.nn.functional import cross_entropy

import flatout
from flatout.world import place

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "sync_and_async")
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 6
RATE, SLOWED = 0.4, 3
COLORS = {"sync": "tab:blue", "async": "tab:orange", "async, smaller rate": "tab:green"}


def ball(rate: float, *, waits: bool, moves: int = 12) -> list[float]:
    """Where the ball lies after each move, with the loss x * x / 2, whose gradient is x.

    Both devices read at once. Where they wait, their mean gradient moves the ball; where they do
    not, the second one moves it by what it has read before the first one moved it.
    """
    places = [1.0]
    while len(places) <= moves:
        read = places[-1]
        if waits:
            places += [read - rate * (read + read) / 2]
        else:
            places += [places[-1] - rate * read, places[-1] - rate * read - rate * read]
    return places[: moves + 1]


def draw_ball():
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, rate in zip(figure.subplots(1, 2, sharey=True), (0.6, 1.0), strict=True):
        for name, waits in (("sync", True), ("async", False)):
            axes.plot(ball(rate, waits=waits), "o-", color=COLORS[name], label=name)
        axes.axhline(0, color="gray", linewidth=0.5)
        axes.set(title=f"rate {rate}", xlabel="moves", ylabel="place of the ball; 0 is lowest")
        axes.legend()
    figure.savefig(folder / "ball.png", dpi=120)


class Slowed(flatout.Callback):
    """Makes the last rank's steps take several times as long, and notes losses as time passes."""

    every = 1

    def __init__(self, times: int):
        self.times = times if place().rank == place().world_size - 1 else 1
        self.began = self.stepped = time.perf_counter()
        self.step = 0
        self.seconds: list[float] = []
        self.steps: list[int] = []
        self.losses: list[float] = []

    def on_fit_start(self, state):
        self.began = self.stepped = time.perf_counter()
        for noted in (self.seconds, self.steps, self.losses):
            noted.clear()  # of looking at the model

    def on_epoch_start(self, state):
        self.stepped = time.perf_counter()  # others may have been waited for

    def note(self, loss: float) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.steps.append(self.step + 1)
        self.losses.append(loss)

    def on_step(self, state):
        own = time.perf_counter() - self.stepped
        time.sleep((self.times - 1) * own)
        self.stepped, self.step = time.perf_counter(), state.step


def train(staleness: str, rate: float, slowed: int) -> tuple[Slowed, flatout.History]:
    """A fit: the losses of the first rank's steps, with their times, and the History."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
    )
    steps, (train_set, test_set) = Slowed(slowed), flatout.data.digits(size=8)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = cross_entropy(outputs, targets)
        if outputs.requires_grad:
            steps.note(float(found))
        return found

    world = {"strategy": "parameter_server", "staleness": staleness}
    trainer = flatout.Trainer(
        model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        metrics=["accuracy"],
        recipe=flatout.Recipe(world=world),
        allow="exact",
    )
    history = trainer.fit(
        train_set, validation_data=test_set, batch_size=64, epochs=epochs, callbacks=[steps]
    )
    return steps, history


def smooth(losses: list[float], over: int = 15) -> list[float]:
    return [
        sum(losses[max(0, n - over) : n + 1]) / min(n + 1, over + 1) for n in range(len(losses))
    ]


def main():
    if place().world_size == 1:
        sys.exit("needs two ranks or more: flatout run --devices 2 examples/sync_and_async.py")
    is_first = place().rank == 0
    ranks = place().world_size
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        draw_ball()
    curves = Figure(figsize=(11, 8), layout="constrained")
    ages = Figure(figsize=(11, 4), layout="constrained")
    above = ages.subplots(1, 2, sharey=True)
    for row, (slowed, histogram) in zip(
        curves.subplots(2, 2, sharey=True), ((1, above[0]), (SLOWED, above[1])), strict=True
    ):
        rate = RATE
        for name in COLORS:
            steps, history = train("sync" if name == "sync" else "unbounded", rate, slowed)
            losses = smooth(steps.losses)
            label = f"{name.split(',')[0]}, rate {rate:.2g}"
            row[0].plot(steps.seconds, losses, color=COLORS[name], label=label)
            # Where ranks step alone, each of a batch's parts makes an update.
            updates = [n if name == "sync" else n * ranks for n in steps.steps]
            row[1].plot(updates, losses, color=COLORS[name], label=label)
            if name == "async":
                rate = RATE / ranks
                draw_ages(histogram, history.staleness)
        who = "even ranks" if slowed == 1 else f"the last rank {slowed} times slower"
        row[0].set(title=f"{who}: over time", xlabel="seconds", ylabel="loss of the first rank")
        row[1].set(title=f"{who}: over updates", xlabel="updates of the weights")
        histogram.set(title=who, xlabel="steps that a gradient is old", ylabel="gradients")
        for axes in (*row, histogram):
            axes.legend()
    if is_first:
        curves.savefig(folder / "loss.png", dpi=120)
        ages.savefig(folder / "staleness.png", dpi=120)
        print(f"drawn: {folder}/ball.png, loss.png, staleness.png")


def draw_ages(axes, staleness):
    for rank, own in enumerate(staleness["by_rank"]):
        ages = [int(age) + 0.4 * rank for age in own]
        axes.bar(ages, list(own.values()), width=0.4, label=f"rank {rank}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.axvline(staleness["mean"], color="gray", label=f"mean {staleness['mean']:.2f}")


if __name__ == "__main__":
    main()
