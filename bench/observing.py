"""What the doctor's hooks add to a step of a raw loop, in place, beside what the doctor counts.

    python bench/observing.py [--restarts 5] [--json [FILE]]

In one process a small model is trained in one thread, and the hooks are taken out of their places
for two blocks of steps and put back: A B B A. Each is taken out alone, too, and nothing at all,
which says what noise makes of 0. All of it is repeated in several processes. What is in no step,
such as the thread that writes, is not in these figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from statistics import median

import numpy as np
import torch
from torch import nn

from flatout.measure import Interval
from flatout.observe.backward import watch_backward
from flatout.observe.cost import added
from flatout.observe.models import Models
from flatout.observe.optimizers import StepFinder, watch_optimizers
from flatout.observe.outputs import watch_torch
from flatout.observe.watch import Watch
from restarts import each, tell
from results import Key, Results, add_arguments, figure, finish, interval_words, over_rows, positive

# Of a block, and before anything is measured: by then most looks at the model's inputs are done.
STEPS, FIRST = 50, 2000

# Takes something out of its place, and returns what puts it back.
Take = Callable[[], Callable[[], object]]


def watched() -> Watch:
    """Hooks into torch as the doctor does."""
    watch = Watch()
    steps = StepFinder(watch)
    watch_optimizers(torch, watch, steps)
    watch_backward(torch, watch, steps)
    watch_torch(torch, watch)
    Models(torch, watch).search()
    return watch


def loop() -> tuple[nn.Module, Callable[[int], float]]:
    """A model, and what trains it for some steps and returns the microseconds of one."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows, classes = torch.randn(64, 16), torch.randint(0, 4, (64,))

    def block(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows), classes).backward()
            optimizer.step()
        return (time.perf_counter() - began) / steps * 1e6

    return model, block


def in_attribute(owner: object, name: str, plain: object | None) -> Take:
    """`plain` in place of an attribute; None leaves it to the classes above."""

    def take() -> Callable[[], object]:
        hook = vars(owner)[name]
        if plain is None:
            delattr(owner, name)
        else:
            setattr(owner, name, plain)
        return lambda: setattr(owner, name, hook)

    return take


def of_optimizers() -> Callable[[], object]:
    """Torch's hooks around the steps of all optimizers."""
    module = sys.modules["torch.optim.optimizer"]
    both = (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks)
    kept = [dict(hooks) for hooks in both]
    for hooks in both:
        hooks.clear()
    return lambda: [hooks.update(one) for hooks, one in zip(both, kept, strict=True)]


def together(takes: Sequence[Take]) -> Take:
    def take() -> Callable[[], object]:
        backs = [one() for one in takes]
        return lambda: [back() for back in backs]

    return take


def measure(
    block: Callable[[int], float], takes: Mapping[str, Take], quadruples: int
) -> dict[str, list[float]]:
    """By how many microseconds a step is longer with each in its place, in each quadruple."""
    found: dict[str, list[float]] = {name: [] for name in takes}
    for _ in range(quadruples):
        for name, take in takes.items():
            first = block(STEPS)
            back = take()
            without = block(STEPS) + block(STEPS)
            back()
            found[name].append((first + block(STEPS) - without) / 2)
    return found


def middle(values: Sequence[float]) -> Interval:
    """The mean of the middle half, with its 95% interval: the percentile bootstrap."""
    array = np.asarray(values)
    drawn = np.random.default_rng(0).integers(0, len(array), (1000, len(array)))
    quarter = len(array) // 4
    means = np.sort(array[drawn], axis=1)[:, quarter : len(array) - quarter].mean(axis=1)
    low, mid, high = np.quantile(means, [0.025, 0.5, 0.975])
    return Interval(float(low), float(mid), float(high))


def once(quadruples: int) -> tuple[dict[str, list[float]], float, float]:
    """In its own process: the differences, what the doctor counts, and a step's time."""
    torch.set_num_threads(1)
    plain = torch.autograd.backward
    watch = watched()
    model, block = loop()
    block(FIRST)
    alone: dict[str, Take] = {
        "model's call": in_attribute(type(model), "__call__", None),
        "backward": in_attribute(torch.autograd, "backward", plain),
        "optimizer's step": of_optimizers,
    }
    takes = {"nothing": together([]), **alone, "all hooks": together([*alone.values()])}
    found = measure(block, takes, quadruples)
    return found, added(watch, 0.0).us_per_step, block(FIRST)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=5)
    parser.add_argument("--quadruples", type=positive, default=150, metavar="N", help="of each")
    arguments = parser.parse_args()

    def restart(number: int) -> tuple[dict[str, list[float]], float, float]:
        with get_context("spawn").Pool(1) as process:
            run = process.apply(once, (arguments.quadruples,))
        tell(f"restart {number + 1}: {run[1]:.1f} us of {run[2]:.0f}, as the doctor counts")
        return run

    # Memory layouts differ between processes, so each restart is a new process.
    runs = each(range(arguments.restarts), restart)
    names = runs[0][0] if runs else ()
    differences = {name: [one for run in runs for one in run[0][name]] for name in names}
    found = {name: middle(values) for name, values in differences.items()}
    counted, step_us = (over_rows(median, runs, lambda run, n=n: run[n]) for n in (1, 2))
    results = Results(
        title="Microseconds that hooks in their places add to a step of "
        + (step_us if isinstance(step_us, str) else f"{step_us:.0f}"),
        headers=["", "longer by", ""],
        lines=[[name, interval_words(one), ""] for name, one in found.items()],
        remarks=[],
        keys=[
            Key("added_us_in_place", figure(lambda: found["all hooks"]), at_most=5),
            Key("added_us_counted", counted, note="as the doctor counts"),
            Key("nothing_us", figure(lambda: found["nothing"]), note="A/A: what noise makes of 0"),
        ],
        data={"step_us": step_us, "differences": differences},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
