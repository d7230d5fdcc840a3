"""What the Profile of a run on a GPU says beside the clock on the wall, and what its lanes cost.

    python bench/gpu_profile.py [--device cuda] [--json [FILE]]

A tiny model, of which the host queues a step no faster than the GPU makes it, and one that keeps
the GPU busy while the host is far ahead. The rate that the Profile tells is laid beside samples and
seconds of whole epochs; so is the one that the host's clocks alone would tell. Then a CPU and the
GPU are compared on the larger one by `flatout forecast`, and its factor laid beside the epochs'.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch
from torch import nn

import flatout
from flatout.forecast import Forecast, ForecastOptions
from flatout.forecast.decisions import Decision, decisions
from flatout.measure import Profile, Timeline, cuda_lanes
from restarts import PROGRESS, each, tell
from results import Key, Results, add_arguments, figure, finish

SETTINGS = {
    "compute": {"precision": "fp32", "memory_format": "contiguous", "rewrites": "off",
                "fused_optimizer": "off", "compile": "off", "capture": "off",
                "cuda_graph": "off"},
    "memory": {"micro_batch": "whole"},
    "input": {"features": "off"},
    "save": {"every": 1_000_000},  # not after each epoch
}  # fmt: skip
# By name: width, hidden layers, samples of a batch, batches of an epoch, epochs.
JOBS = {"small steps": (64, 1, 256, 400, 8), "large steps": (2048, 6, 1024, 40, 8)}
BATCHES_ON_CPU = 3
LANES_TIMED = 5_000


def model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(width, 10))


@contextmanager
def by_the_host(alone: bool) -> Iterator[None]:
    """Within, lanes of a GPU are read from the host's clock, if that is asked for."""
    from flatout.train import loop

    kept = loop.cuda_lanes
    if alone:
        loop.cuda_lanes = lambda timeline, device: None  # type: ignore[assignment]
    try:
        yield
    finally:
        loop.cuda_lanes = kept


def train(name: str, device: str, folder: Path, *, batches: int | None = None) -> Profile:
    """The Profile of a job on a device."""
    width, layers, size, of_epoch, epochs = JOBS[name]
    samples = size * (of_epoch if batches is None else batches)
    x, y = torch.randn(samples, width), torch.arange(samples) % 10
    recipe = flatout.Recipe(world={"device": device}, **SETTINGS)
    trainer = flatout.Trainer(
        model(width, layers), loss="cross_entropy", recipe=recipe, run=folder, say=lambda line: None
    )
    trainer.fit((x, y), batch_size=size, epochs=epochs if batches is None else 14, progress=False)
    return Profile.read(folder)


def rate_of_epochs(profile: Profile) -> float:
    """Samples per second by the wall's clock, without the first epoch."""
    first, last = profile.epochs[0], profile.epochs[-1]
    return (last["samples"] - first["samples"]) / (last["at_s"] - first["at_s"])


def told(profile: Profile) -> float:
    assert profile.steps.samples_per_s is not None
    return profile.steps.samples_per_s[1]


def lanes_us(device: torch.device) -> float:
    """What events cost the host in a step, in microseconds; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    lanes = cuda_lanes(Timeline(), device)
    for timed in (False, True):
        began = time.perf_counter()
        for _ in range(LANES_TIMED):
            lanes.begin()
            for lane in ("forward", "backward", "optimizer"):
                lanes.mark(lane)
            lanes.record(time.perf_counter_ns(), 0, 0, 0, 0, 0, 0, 1)
        if timed:
            return (time.perf_counter() - began) / LANES_TIMED * 1e6
    raise AssertionError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=1)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    lines: list[list[str]] = []
    off: list[float] = []
    decided: list[Decision] = []
    factors: list[float] = []
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as temporary:
        folder = Path(temporary)

        def measure(unit: tuple[str, bool]) -> None:
            name, alone = unit
            with by_the_host(alone):
                profile = train(name, asked.device, folder / f"{name} {alone}")
            truth = rate_of_epochs(profile)
            error = told(profile) / truth - 1
            off.extend([] if alone else [abs(error)])
            how = "the host's clock" if alone else "the Profile"
            lanes = profile.ranks[0].lanes_ms
            parts = [f"{lanes[lane]:.3g}" for lane in ("forward", "backward", "optimizer")]
            rates = [f"{truth:,.0f}", f"{told(profile):,.0f}", f"{error:+.1%}"]
            lines.append([f"{name}, {how}", *rates, *parts])
            tell("  ".join(lines[-1]))

        def compare(name: str) -> None:
            on_cpu = train(name, "cpu", folder / "cpu", batches=BATCHES_ON_CPU)
            on_gpu = folder / f"{name} False"
            forecast = Forecast.of([str(folder / "cpu"), str(on_gpu)], ForecastOptions())
            decided.extend(one for one in decisions(forecast) if one.about == "device")
            factors.append(rate_of_epochs(Profile.read(on_gpu)) / rate_of_epochs(on_cpu))

        each(product(JOBS, (False, True)), measure)
        each(["large steps"], compare)
        lanes = each([torch.device(asked.device)], lanes_us)
    factor: float | str = figure(lambda: factors[0])
    said = decided[0].number if decided else None
    results = Results(
        title="Samples per second of epochs, and as told; ms of lanes",
        headers=["", "epochs", "told", "error", "forward", "backward", "optimizer"],
        lines=lines,
        remarks=[one.words for one in decided],
        keys=[
            Key(
                "gpu_rate_error",
                figure(lambda: max(off)),
                at_most=0.06,
                note="of the Profile, the larger",
            ),
            Key(
                "gpu_factor_error",
                PROGRESS.reason or "one kind of machine"
                if said is None or isinstance(factor, str)
                else abs(max(said, 1 / said) / factor - 1),
                at_most=0.1,
                note="of what the forecast says of the GPU beside the CPU",
            ),
            Key("gpu_lanes_us_per_step", figure(lambda: lanes[0]), at_most=20),
        ],
        data={"factor": factor, "said": said},
    )
    return finish(results, asked)


if __name__ == "__main__":
    sys.exit(main())
