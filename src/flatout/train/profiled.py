"""The parts of a Profile, each read from a Loop."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from flatout.data import Batch, Pipeline, files_read
from flatout.measure import LANES, QUANTILES, RankProfile, Steps, Use, fingerprint, median_of
from flatout.models import adapter_of
from flatout.optim import optimizer_adapter
from flatout.strategies import bytes_per_average
from flatout.train.history import json_safe
from flatout.train.loop_state import LoopState
from flatout.train.resume.resume import source_state
from flatout.world import RANKS_TRIED, interface_of, servers, source_address

# Number of latest steps whose times a Profile keeps, and from which it computes quantiles.
_MOST_STEPS = 2_000

Kind = Literal["Trainer", "Keras", "Loop"]


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return a model's name and numbers of parameters; call it before ranks shard the model."""
    parameters = {id(parameter): parameter for parameter in adapter_of(model).parameters()}.values()
    return {
        "name": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }


def bytes_per_sample(first: Sequence[Batch]) -> float | None:
    """Return the mean number of bytes per sample in the first batch."""
    if not first or not first[0].samples:
        return None
    return sum(tensor.nbytes for tensor in first[0].tensors()) / first[0].samples


class Steady(NamedTuple):
    """The steps that show the speed of a run, in order.

    They ran under the settings that the run ended with. The first tenth of such steps is warm-up
    and left out.

    Attributes:
        steps: number of steady steps.
        rows: start and durations in ns of the latest steady steps, as in `Timeline.rows`.
        samples: number of samples of each step in `rows`.
    """

    steps: int
    rows: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]


def steady_steps(loop: LoopState) -> Steady:
    """Return the steady steps among those that the timeline keeps."""
    samples = loop.timeline.step_samples()
    spans = (loop.tuning or {}).get("spans", [])
    ran = np.zeros(len(samples), bool)
    before = loop.step_count - loop.timeline.behind[0] - len(samples) + 1
    for span in spans:
        if span["settings"] == spans[-1]["settings"]:
            ran[max(0, span["first"] - before) : max(0, span["last"] - before + 1)] = True
    places = np.flatnonzero(ran) if ran.any() else np.arange(len(samples))
    steady = places[len(places) // 10 :]
    latest = steady[-_MOST_STEPS:]
    return Steady(steady.size, loop.timeline.rows()[latest], samples[latest])


def rank_profile(loop: LoopState, use: Use, waited: int, steady: Steady) -> RankProfile:
    """Return the measurements of this rank for the Profile."""
    place = loop.world.place
    steps = max(1, loop.timeline.steps)
    return RankProfile(
        rank=loop.world.rank,
        node=place.node,
        host=socket.gethostname(),
        device=str(loop.device),
        threads=torch.get_num_threads(),
        steps=loop.timeline.steps,
        lanes_ms={lane: round(ms, 6) for lane, ms in loop.timeline.lanes().items()},
        quantiles_ms=_quantiles(steady),
        waited_ms=round((loop.world.collectives.waited - waited) / steps / 1e6, 6),
        use=use.as_dict(),
        machine=fingerprint().as_dict(),
    )


def _quantiles(steady: Steady) -> dict[str, list[float]]:
    if not steady.steps:
        return {}
    ms = steady.rows[:, 1:] / 1e6
    lanes = np.column_stack([ms, ms.sum(axis=1)])
    quantiles = np.quantile(lanes, QUANTILES, axis=0).round(6).T.tolist()
    return dict(zip((*LANES[:7], "step"), quantiles, strict=True))


def steps(loop: LoopState, before: int, steady: Steady, *, is_over: bool) -> Steps:
    """Return figures of the steps; compute the confidence interval, which is slow, at the end."""
    known = Steps(
        first=before + 1,
        last=loop.step_count,
        samples=loop.timeline.samples,
        batch_size=None,
        steady=steady.steps,
        noise=_noise(loop),
    )
    if not steady.steps:
        return known
    size, ms = float(np.median(steady.samples)), steady.rows[:, 1:].sum(axis=1) / 1e6
    is_alike = steady.samples == size
    alike = ms[is_alike if is_alike.any() else ...]
    latest = [float(f"{each:.5g}") for each in over_periods(alike, _period(loop)) if each > 0]
    per_s = None
    if latest and is_over:
        low, mid, high = median_of([ms / 1e3 for ms in latest])
        per_s = (1 / high, 1 / mid, 1 / low)
    return replace(
        known,
        batch_size=size or None,
        step_ms=latest,
        per_s=per_s,
        samples_per_s=None if per_s is None or not size else _times(per_s, size),
    )


def over_periods(ms: npt.NDArray[np.float64], period: int) -> npt.NDArray[np.float64]:
    """Replace each step's time by the mean of the period that ends with this step.

    With fewer steps than a period, return `ms` unchanged. Where ranks average only once in each
    period, the median step does not show the cost of averaging.
    """
    if period == 1 or len(ms) < period:
        return ms
    return np.convolve(ms, np.full(period, 1 / period), "valid")


def _period(loop: LoopState) -> int:
    world = loop.asked.recipe.world
    return world.sync_every if loop.asked_strategy == "local_sgd" else 1


def _times(rates: tuple[float, float, float], size: float) -> tuple[float, float, float]:
    low, mid, high = (rate * size for rate in rates)
    return low, mid, high


def _noise(loop: LoopState) -> float | None:
    trials = (loop.tuning or {}).get("trials", [])
    floors = [trial["floor"] for trial in trials if trial.get("floor") is not None]
    return round(median(floors), 4) if floors else None


def kind_of(loop: LoopState) -> Kind:
    """Return the API in use: "Trainer", "Keras" or "Loop"."""
    if loop.identity.trainer is None:
        return "Loop"
    return "Keras" if adapter_of(loop.model).framework == "Keras" else "Trainer"


def job(loop: LoopState) -> dict[str, str]:
    """Return the facts that identify the job, in words, except those about its data."""
    facts = {name: words for name, (words, _) in loop.identity.job.get("facts", {}).items()}
    for number, optimizer in enumerate(loop.optimizers, 1):
        own = optimizer_adapter(optimizer).given
        words = type(own).__name__
        for group in loop.identity.job.get("options", [[]] * number)[number - 1][:1]:
            shown = [f"{name}={value}" for name, value in _given(own, group).items()]
            words += f"({', '.join(shown)})"
        facts[f"optimizer {number}"] = words
    with suppress(OSError):
        digest = hashlib.sha256(Path(sys.argv[0]).read_bytes()).hexdigest()[:12]
        facts["script"] = f"{Path(sys.argv[0]).name}, sha256 {digest}"
    return {name: str(words) for name, words in facts.items()}


def world(loop: LoopState) -> dict[str, Any]:
    """Return facts about the ranks, and the steps per second measured with other rank counts."""
    place = loop.world.place
    strategy = "" if loop.resolved is None else loop.asked_strategy
    there = servers.apart()
    tried = {}
    with suppress(ValueError):
        tried = json.loads(os.environ.get(RANKS_TRIED, "{}"))
    return {
        "size": loop.world.size,
        "nodes": place.nodes,
        "ranks_per_node": place.local_world_size,
        "strategy": strategy or None,
        **({"servers_apart": there.size} if there is not None else {}),
        **({"steps_per_s_by_ranks": tried} if tried else {}),
    }


def network(loop: LoopState) -> dict[str, Any] | None:
    """Return this rank's network address and interface; None where there is a single rank."""
    place = loop.world.place
    if place.world_size == 1:
        return None
    address = interface = None
    with suppress(OSError):
        address = source_address(place.address, place.port or 9)
        interface = interface_of(address)
    return {"address": address, "interface": interface, "mbit_per_s": _speed_of(interface)}


def recipe(loop: LoopState) -> dict[str, Any] | None:
    """Return the settings of the steps, with reasons."""
    resolved = loop.resolved
    if resolved is None:
        return None
    changes = resolved.changes()
    return {
        "summary": resolved.summary(),
        "values": json_safe(resolved.resolved()),
        "reasons": {change.field: change.reason for change in changes},
        "measured": {change.field: change.ratio for change in changes if change.ratio},
    }


def data(loop: LoopState) -> dict[str, Any] | None:
    """Return the facts that identify the data."""
    source = loop.feed.source
    if source is None:
        return None
    if loop.identity.data is None:
        loop.identity.data = source_state(source)
    state, files = loop.identity.data, files_read(source)
    return {
        "words": state["words"],
        "digest": state["digest"],
        "samples": source.samples,
        "batches": state["steps"],
        "batch_size": state["batch_size"],
        **({} if files is None else asdict(files)),
        **(
            {}
            if loop.trainer.largest_batch is None
            else {"largest_batch": loop.trainer.largest_batch}
        ),
    }


def input_facts(loop: LoopState) -> dict[str, Any]:
    """Return the cost of the input stages, and the samples per second that they could reach."""
    known: dict[str, Any] = {}
    source = loop.feed.source
    if not isinstance(source, Pipeline) or not source.in_batches:
        return known
    explanation = source.explanation()
    ms = sum(explanation.stages.values())
    could = None
    if ms and source.batch_size and not explanation.processes:
        could = source.batch_size * max(1, explanation.threads) / ms * 1e3
    return known | {
        "samples_per_s": could,
        "stages_ms": json_safe(explanation.stages),
        "threads": explanation.threads,
        "processes": explanation.processes,
        "waited": explanation.waited,
    }


def communication(loop: LoopState) -> dict[str, Any]:
    """Return the traffic of each step between ranks.

    For a single rank, return the bytes that local SGD would send per average.
    """
    if loop.world.size == 1:
        if not all(optimizer_adapter(optimizer).averages_state for optimizer in loop.optimizers):
            return {}
        return {"bytes_per_average": bytes_per_average(loop.model, loop.optimizers)}
    assert loop.resolved is not None
    return {
        "reduction": loop.resolved.world.reduction,
        **json_safe(loop.stepper.strategy.traffic()),
    }


@cache
def versions(kind: Kind) -> dict[str, str]:
    """Return the versions of Python and of the packages that train."""
    result = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("flatout", "torch", *(["keras"] if kind == "Keras" else [])):
        with suppress(PackageNotFoundError):
            result[name] = version(name)
    return result


def _speed_of(interface: str | None) -> int | None:
    with suppress(OSError, ValueError):
        speed = int(Path(f"/sys/class/net/{interface}/speed").read_text())
        return speed if speed > 0 else None
    return None


def _given(optimizer: Any, group: dict[str, Any]) -> dict[str, Any]:
    taken = inspect.signature(type(optimizer)).parameters
    given = {}
    for name, value in group.items():
        option = tuple(value) if isinstance(value, list) else value
        is_given = name in taken and option != taken[name].default
        if _is_shown(option) and (name in ("lr", "learning_rate") or is_given):
            given[name] = _short(option)
    return given


def _short(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _is_shown(value: Any) -> bool:
    return isinstance(value, int | float | str | tuple)
