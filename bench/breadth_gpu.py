"""`fit` with nothing set on one GPU, beside loops that one writes by hand for it.

    python bench/breadth_gpu.py [--seconds 20] [--only resnet gpt] [--compile] [--json [FILE]]

The families are those of bench/breadth.py, with batches for a GPU. By hand the data lie on the
device and no step waits for it: fp32, TF32, bf16 with a fused optimizer, channels_last, forward and
backward as CUDA graphs (`torch.cuda.make_graphed_callables`), and with `--compile` torch.compile.
The planned run is as many steps as plain fp32 makes in `--seconds`. Each arm is a forked process,
so each loads its kernels itself, and all its seconds count from data and model on the CPU on: by
hand what comes before the timed steps and those steps, by default the whole fit with what it
measures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import torch
import torch._dynamo  # making an optimizer imports it, which takes seconds, in each forked process
from breadth_models import FAMILIES, Family

import flatout
from flatout.recipe import World
from restarts import each, tell
from results import Key, Results, add_json_argument, add_limits, finish, over_rows

# Samples of a step, in the order in which they run.
SIZES = {"mlp": 256, "resnet": 512, "depthwise": 512, "vit": 512, "gpt": 256, "lstm": 256}
IMAGES = ("resnet", "depthwise")
# Batches that are kept in memory; steps before those that are timed, and windows of those.
BATCHES, WARM_UP, WINDOWS = 24, 12, 3
Part = tuple[torch.Tensor, torch.Tensor]


def arms(name: str, *, compiles: bool) -> list[str]:
    best = "bf16+fused"
    found = ["fp32", "tf32", best]
    if name in IMAGES:
        best += "+channels_last"
        found.append(best)
    return [*found, f"{best}+graph", *([f"{best}+compile"] if compiles else []), "again"]


class ByHand:
    """A loop as an expert writes it.

    Args:
        family: the model, and its loss.
        arm: parts joined by +.
        data: on the device.
    """

    def __init__(self, family: Family, arm: str, data: Part) -> None:
        self.family, self.arm, (self.x, self.y) = family, set(arm.split("+")), data
        self.device = self.x.device
        torch.manual_seed(0)
        self.model = family.model().to(self.device)
        if "channels_last" in self.arm:
            self.model = self.model.to(memory_format=torch.channels_last)
        fused = "fused" in self.arm or None
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=fused)
        self.run: Any = torch.compile(self.model) if "compile" in self.arm else self.model
        self.order: list[torch.Tensor] = []

    def cast(self) -> Any:
        if "bf16" not in self.arm:
            return nullcontext()
        # A cast weight of one graph must not be taken in another.
        return torch.autocast(
            self.device.type, torch.bfloat16, cache_enabled="graph" not in self.arm
        )

    def inputs(self, at: torch.Tensor) -> torch.Tensor:
        x = self.x[at]
        return (
            x.to(memory_format=torch.channels_last)
            if "channels_last" in self.arm and x.dim() == 4
            else x
        )

    def graph(self, size: int) -> None:
        """Forward and backward of the model, on batches of this size, as CUDA graphs."""
        sample = self.inputs(torch.arange(size, device=self.device))
        with self.cast():
            self.run = torch.cuda.make_graphed_callables(self.model, (sample,))

    def step(self, size: int) -> None:
        if not self.order:
            whole = torch.randperm(len(self.y), device=self.device).split(size)
            self.order = [part for part in whole if len(part) == size]
        at = self.order.pop()
        self.optimizer.zero_grad()
        with self.cast():
            loss = self.family.loss(self.run(self.inputs(at)).float(), self.y[at])
        loss.backward()
        self.optimizer.step()


def finished(device: torch.device) -> float:
    """The time, when the device has done all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def data_of(name: str) -> Part:
    """The samples of a family, on the CPU."""
    torch.manual_seed(1)
    x = FAMILIES[name].inputs(BATCHES * SIZES[name])
    return x, FAMILIES[name].targets(x)


def by_hand(name: str, arm: str, seconds: float, device: str) -> dict[str, float]:
    """The median seconds of a step over some windows, and those that come before all steps."""
    torch.set_float32_matmul_precision("high" if "tf32" in arm else "highest")
    size, (x, y) = SIZES[name], data_of(name)
    place = torch.device(device)
    torch.zeros(1, device=place)  # a process has its context
    began = finished(place)
    loop = ByHand(FAMILIES[name], arm, (x.to(place), y.to(place)))
    if "graph" in arm and place.type == "cuda":
        loop.graph(size)
    for _ in range(WARM_UP):
        loop.step(size)
    warm = finished(place)
    loop.step(size)
    loop.step(size)
    steps = max(3, round(seconds / WINDOWS / (finished(place) - warm) * 2))
    windows = []
    for _ in range(WINDOWS):
        start = finished(place)
        for _ in range(steps):
            loop.step(size)
        windows.append((finished(place) - start) / steps)
    step_s = median(windows)
    return {"step_s": step_s, "setup_s": max(0.0, warm - began - WARM_UP * step_s)}


def by_default(name: str, steps: int, device: str) -> dict[str, Any]:
    """What a Trainer with nothing set takes for about so many steps, with an empty cache."""
    family, size, (x, y) = FAMILIES[name], SIZES[name], data_of(name)
    torch.manual_seed(0)
    model = family.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    said: list[str] = []
    recipe = flatout.Recipe(world=World(device=device))
    trainer = flatout.Trainer(
        model, loss=family.loss, optimizer=optimizer, say=said.append, recipe=recipe
    )
    place = torch.device(device)
    torch.zeros(1, device=place)
    began = finished(place)
    history = trainer.fit(
        x, y, batch_size=size, epochs=max(1, round(steps / BATCHES)), progress=False
    )
    seconds = finished(place) - began
    times = history.step_times
    last = times[-max(1, len(times) // 3) :]
    tuning = history.tuning or {"before_first_step_s": 0.0, "lost_s": 0.0}
    assert history.recipe is not None
    return {
        "fit_s": seconds,
        "steps": history.timeline.steps,
        "step_s": float(last.mean()),  # the host is ahead of the device, so one step tells nothing
        "words": history.recipe.summary(),
        "chosen": {change.field: change.value for change in history.recipe.changes()},
        "before_s": tuning["before_first_step_s"],
        "lost_s": tuning["lost_s"],
        "trials": tuning.get("trials", []),
        "dropped": tuning.get("dropped", {}),
        "lanes_ms": history.timeline.lanes(),
        "said": [*said, *history.notes],
    }


def forked(what: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives in a process of its own, with an empty cache."""

    def run(end: Connection) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FLATOUT_CACHE"] = folder
            try:
                end.send(what(*arguments))
            except RuntimeError as error:
                end.send(error)

    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=run, args=(theirs,))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = RuntimeError(f"{what.__name__}{arguments} ended without a result")
    except KeyboardInterrupt:
        process.kill()
        raise
    process.join()
    if isinstance(found, RuntimeError):
        raise found
    return found


def measure(name: str, a: argparse.Namespace) -> dict[str, Any]:
    """All arms of a family, and what the default came to."""
    found, failed = {}, {}
    for arm in arms(name, compiles=a.compile):
        plain = "fp32" if arm == "again" else arm
        try:
            found[arm] = forked(by_hand, name, plain, a.window, a.device)
        except RuntimeError as error:  # an expert would leave it, too
            failed[arm] = str(error).splitlines()[0]
    step_s = {arm: one["step_s"] for arm, one in found.items()}
    setup_s = {arm: one["setup_s"] for arm, one in found.items()}
    again = step_s.pop("again") / step_s["fp32"]
    step_s["fp32"] *= min(1.0, again)
    fit = forked(by_default, name, max(48, round(a.seconds / step_s["fp32"])), a.device)
    hand = {arm: fit["steps"] * step + setup_s[arm] for arm, step in step_s.items()}
    best = min(hand, key=lambda arm: hand[arm])
    row = {
        "family": name,
        "batch": SIZES[name],
        "steps": fit["steps"],
        "plain_s": step_s["fp32"],
        "again": again,
        "hand_s": step_s,
        "setup_s": setup_s,
        "failed": failed,
        "best": best,
        "vs_hand": hand[best] / fit["fit_s"],
        "vs_plain": hand["fp32"] / fit["fit_s"],
        "steady_vs_hand": step_s[best] / fit["step_s"],
        "steady_vs_plain": step_s["fp32"] / fit["step_s"],
        "before_s": fit["before_s"],
        "tuning_share": (fit["before_s"] + fit["lost_s"]) / fit["fit_s"],
        "fit": fit,
    }
    tell("  ".join(line(row)))
    return row


def keys(rows: list[dict[str, Any]]) -> list[Key]:
    steady = "the last third of the steps"
    return [
        Key("gpu_default_vs_best_by_hand", over_rows(median, rows, "vs_hand"), at_least=1.0),
        Key("gpu_default_vs_best_worst", over_rows(min, rows, "vs_hand"), at_least=0.95),
        Key("gpu_default_vs_plain", over_rows(median, rows, "vs_plain"), at_least=1.5),
        Key("gpu_default_vs_plain_worst", over_rows(min, rows, "vs_plain"), at_least=1.0),
        Key("gpu_steady_vs_best", over_rows(median, rows, "steady_vs_hand"), note=steady),
        Key("gpu_steady_vs_best_worst", over_rows(min, rows, "steady_vs_hand"), note=steady),
        Key("gpu_tuning_share", over_rows(max, rows, "tuning_share"), at_most=0.05),
        Key("gpu_seconds_before_first_step", over_rows(max, rows, "before_s"), at_most=6.0),
    ]


def line(row: dict[str, Any]) -> list[str]:
    def rate(seconds: float) -> str:
        return f"{row['plain_s'] / seconds:.2f}"

    return [
        row["family"],
        str(row["batch"]),
        f"{1e3 * row['plain_s']:.2f}",
        f"{row['again']:.2f}",
        rate(row["hand_s"][row["best"]]),
        row["best"],
        f"{row['vs_plain']:.2f}",
        rate(row["fit"]["step_s"]),
        f"{row['steady_vs_hand']:.2f}",
        f"{row['vs_hand']:.2f}",
        f"{row['before_s']:.2f}",
        row["fit"]["words"],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_argument(parser)
    add_limits(parser)
    parser.add_argument("--check", action="store_true", help="exit 1 if a key is not met")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the plain run")
    parser.add_argument("--window", type=float, default=0.6, help="seconds of an arm by hand")
    parser.add_argument("--only", nargs="*", choices=SIZES)
    parser.add_argument("--compile", action="store_true", help="torch.compile by hand, too")
    parser.add_argument("--device", default="cuda:0", help="cpu tries the bench itself")
    a = parser.parse_args()
    rows = each(a.only or SIZES, lambda name: measure(name, a))
    # Last: a process that has CUDA cannot fork one that uses it.
    name = torch.cuda.get_device_name() if a.device.startswith("cuda") else "a CPU"
    results = Results(
        title=f"On {name}, planned for {a.seconds:g} s of plain steps",
        headers=[
            "family", "batch", "plain ms", "A/A", "by hand", "which", "default", "steady",
            "steady vs hand", "vs hand", "before s", "chosen",
        ],
        lines=[line(row) for row in rows],
        remarks=["by hand, default (whole runs), steady (last third): times as fast as plain"],
        keys=keys(rows),
        data={"rows": rows},
    )  # fmt: skip
    return finish(results, a)


if __name__ == "__main__":
    sys.exit(main())
