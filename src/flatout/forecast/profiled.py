"""The inputs of the model from Profiles: the job, its timed steps, and the range of each term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from flatout.errors import FlatoutError
from flatout.forecast.job import (
    GPU_SUMS,
    Bucket,
    Job,
    Prior,
    Range,
    ReductionTime,
    Shape,
    Spread,
    StepTime,
    Strategy,
    cut,
)
from flatout.forecast.network import Network
from flatout.measure import STEP_LANES, Profile, mean_use, median_of
from flatout.recipe import Recipe, apply

BUSY = 0.9
"""Utilization from which a device counts as fully used."""
TCP: Range = (0.45, 0.75)
"""Range of the share of a link's nominal rate that TCP reaches; see docs/forecast.md."""
# Minimum number of steady steps of a Profile.
_FEWEST_STEPS = 30
# Smallest relative noise of a run's median step time, since two processes differ more than the
# steps of one process.
_LEAST_NOISE = 0.015
# Relative noise of step times that a run has measured with other batch sizes or numbers of ranks.
_TRIED_NOISE = 0.03
# Share of a step from which waiting for input counts as more than overhead.
_WAITS = 0.05
# Ranges of `Prior.contention` and `Prior.power` on CPUs. Ranks of one host share its CPUs: each of
# k ranks takes about k times as long.
_CPU_CONTENTION, _CPU_POWER = (0.4, 1.2), (0.8, 1.0)
# Range of the input rate with several readers or on another day, as a share of the measured rate.
_INPUT_BAND = (0.9, 1.1)
_SETTINGS = tuple(
    f"world.{name}"
    for name in (
        "strategy", "reduction", "compression", "powersgd_rank", "servers", "sync_every",
        "tables",
    )
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredRuns:
    """Runs of one job on one kind of machine.

    Attributes:
        profiles: the runs, in order of increasing number of ranks.
        rows: timed steps, with their ranks and batch.
        prior: range of each unknown value of the model; the network between hosts is left out.
        batch: number of samples in a step of all ranks together.
        input_per_host: samples per second that a host can read; None where this is unknown.
        notes: assumptions that were made, as sentences for the user.
    """

    profiles: tuple[Profile, ...]
    job: Job
    rows: tuple[StepTime, ...]
    prior: Prior
    device: str
    batch: float
    input_per_host: Range | None
    notes: tuple[str, ...] = field(default=())

    @property
    def first(self) -> Profile:
        return self.profiles[0]

    @property
    def per_host(self) -> int:
        return int(self.profiles[-1].world["ranks_per_node"])

    @property
    def most_ranks(self) -> int:
        return max(row.shape.ranks for row in self.rows if not row.shape.silent)

    @property
    def has_crossed(self) -> bool:
        return any(row.shape.hosts > 1 for row in self.rows)


def read_runs(runs: Sequence[str], settings: Mapping[str, Any]) -> list[MeasuredRuns]:
    """Read runs of one job; return them by kind of machine, in the given order."""
    profiles: list[Profile] = []
    for run in runs:
        if Path(run).resolve() in {Path(run).resolve() for run in runs[: len(profiles)]}:
            raise FlatoutError("a run is named twice", where=run, do="name each run once")
        profiles.append(_checked(Profile.read(run), run))
    for profile, run in zip(profiles, runs, strict=True):
        _check_alike(profiles[0], profile, run)
    kinds: dict[tuple[str, ...], list[Profile]] = {}
    for profile in profiles:
        kinds.setdefault(_kind(profile), []).append(profile)
    return [_measured(kind, settings) for kind in kinds.values()]


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return settings of `world` by name, from texts such as "world.reduction=hierarchical".

    Raises:
        FlatoutError: a setting is unknown, has a bad value, or is not forecast.
    """
    result = apply(Recipe(), settings).named()
    for name, value in result.items():
        if name not in _SETTINGS or value == "staged":
            raise FlatoutError(
                f"{name}={value} is not forecast",
                where=f"--set {name}={value}",
                do=f"set one of {', '.join(_SETTINGS)}",
            )
    return dict(result)


def sent_alone(network: Network, job: Job) -> list[ReductionTime]:
    """Return the network's timed reductions between hosts for which the model has a formula."""
    result = []
    for collective in network.collectives:
        if (
            collective.op != "all_reduce"
            or collective.ranks == 1
            or collective.ranks % collective.hosts
        ):
            continue
        reduction = collective.reduction or job.reduction
        if reduction not in ("all_reduce", "nccl", "shared", "ring", "to_one", "hierarchical"):
            continue
        shape = Shape(collective.hosts, collective.ranks // collective.hosts, job.batch)
        seconds, noise = _median(collective.seconds)
        result.append(ReductionTime(shape, reduction, collective.bytes, seconds, max(0.03, noise)))  # type: ignore[arg-type]
    return result


def use_of(profile: Profile) -> tuple[float | None, str]:
    """Return the utilization of the device, 0 to 1 or None if unknown, and the device's name."""
    result = mean_use(profile.ranks[0].use)
    if _device(profile) == "cuda":
        return result.get("gpu"), "GPU"
    ranks = int(profile.world["ranks_per_node"])
    cpus = profile.ranks[0].machine.get("cpus")
    busy = result.get("cpus")
    return (None if busy is None or not cpus else min(1.0, busy * ranks / cpus)), "cores"


def lane_share(profile: Profile, *lanes: str) -> float:
    ms = profile.ranks[0].lanes_ms
    whole = sum(ms.get(lane, 0.0) for lane in STEP_LANES)
    return sum(ms.get(lane, 0.0) for lane in lanes) / whole if whole else 0.0


def input_wait(profile: Profile) -> float:
    return lane_share(profile, "input")


def _checked(profile: Profile, run: str) -> Profile:
    if len(profile.steps.step_ms) < _FEWEST_STEPS or not profile.steps.batch_size:
        raise FlatoutError(
            f"expected the Profile of {_FEWEST_STEPS} steady steps or more, found "
            f"{len(profile.steps.step_ms)}",
            where=run,
            do="train for longer, or name another run",
        )
    if profile.world["strategy"] == "staged":
        raise FlatoutError(
            "staged runs cannot be forecast: more ranks are other stages there",
            where=run,
            do="name a run with another world.strategy",
        )
    return profile


def _check_alike(first: Profile, profile: Profile, run: str) -> None:
    for name in ("name", "parameters", "trained"):
        if profile.model[name] != first.model[name]:
            raise FlatoutError(
                f"the runs train other models: {name} is {profile.model[name]}, and "
                f"{first.model[name]} in {first.run}",
                where=run,
                do="name runs of one job",
            )


def _device(profile: Profile) -> str:
    return profile.ranks[0].device.partition(":")[0]


def _kind(profile: Profile) -> tuple[str, ...]:
    machine = profile.ranks[0].machine
    gpus = machine.get("gpus") or []
    return (_device(profile), str(machine.get("cpu")), str(gpus))


def _measured(found: Sequence[Profile], settings: Mapping[str, Any]) -> MeasuredRuns:
    profiles = sorted(found, key=lambda value: value.world["size"])
    first, last = profiles[0], profiles[-1]
    device = _device(first)
    notes: list[str] = []
    batch = float(first.steps.batch_size or 0)
    job = _job(first, last, settings, notes)
    rows = [row for profile in profiles for row in _rows(profile)]
    fixed = lane_share(first, "optimizer", "host")
    prior = Prior(
        fixed=(fixed, fixed + 0.4 * (1 - fixed)),
        spread=(0.05, 1.0) if job.spread.is_measured else (0.002, 0.05),
    )
    if device == "cpu":
        shared: dict[str, Range] = {"contention": _CPU_CONTENTION, "power": _CPU_POWER}
        prior = replace(prior, inside=(5e8, 1e10), **shared)
    else:
        prior = replace(prior, inside=(5e9, 5e11), summing=GPU_SUMS)
    return MeasuredRuns(
        tuple(profiles), job, tuple(rows), prior, device, batch, _input(first), tuple(notes)
    )


def _job(first: Profile, last: Profile, settings: Mapping[str, Any], notes: list[str]) -> Job:
    values = {**((last.recipe or {}).get("values") or {}), **settings}
    strategy: Strategy = settings.get("world.strategy") or last.world["strategy"] or "ddp"
    reduction = values.get("world.reduction", "auto")
    if reduction == "auto" or (reduction == "all_reduce" and _device(first) == "cuda"):
        reduction = "nccl" if _device(first) == "cuda" else "shared"
    buckets = _buckets(last)
    if not buckets:
        buckets = cut(4.0 * last.model["trained"])
        notes.append("buckets of 25 MB are assumed: no run tells its own")
        if values.get("compute.touched_rows", "off") != "off":
            notes.append("tables are taken to be sent whole: a run of 2 ranks tells more")
    if last.state == "running":
        notes.append(f"{last.run} had not ended: as of step {last.steps.last:,}")
    rank_batch = float(first.steps.batch_size or 0) / first.world["size"]
    rows, ranks = last.communication.get("sparse_bytes_per_step") or 0.0, last.world["size"]
    if (tables := values.get("world.tables", "replicated")) == "sharded" and ranks > 1:
        rows *= ranks / (ranks - 1)  # a rank's own rows of its batch do not travel
    return Job(
        buckets=buckets,
        batch=rank_batch,
        backward=_backward(first),
        strategy=strategy,
        reduction=reduction,
        compression=values.get("world.compression", "off"),
        powersgd_rank=values.get("world.powersgd_rank", 4),
        served=_served(last, values, settings),
        servers=values.get("world.servers", 1),
        row_bytes=rows / (float(last.steps.batch_size or 1) / ranks),
        tables=tables,
        sync_every=values.get("world.sync_every", 32),
        averaged=_averaged(first, last),
        spread=Spread(None if _steps_apart(first) else first.steps.step_ms),
    )


def _served(
    last: Profile, values: Mapping[str, Any], settings: Mapping[str, Any]
) -> Literal["ranks", "reduced", "towers", "apart"]:
    waits = values.get("world.staleness", "sync") == "sync" and not values.get(
        "world.spare_workers"
    )
    if last.world.get("servers_apart") and "world.strategy" not in settings:
        return "towers" if waits else "apart"
    return "reduced" if waits else "ranks"


def _averaged(first: Profile, last: Profile) -> float:
    result = (item.communication.get("bytes_per_average") for item in (last, first))
    return float(next((bytes for bytes in result if bytes), 0.0))


def _backward(profile: Profile) -> float:
    lanes = profile.ranks[0].lanes_ms
    backward = lanes.get("backward", 0.0)
    if not backward:
        return 2 / 3
    return backward / sum(lanes[lane] for lane in ("forward", "backward", "optimizer", "host"))


def _buckets(profile: Profile) -> tuple[Bucket, ...]:
    backward = profile.ranks[0].lanes_ms.get("backward", 0.0)
    result = [item for item in profile.communication.get("buckets", ()) if item["bytes"]]
    tells = _device(profile) == "cpu" and backward > 0
    return tuple(
        Bucket(
            float(item["bytes"]),
            min(1.0, item["ready_ms"] / backward) if tells else (place + 1) / len(result),
        )
        for place, item in enumerate(result)
    )


def _rows(profile: Profile) -> list[StepTime]:
    hosts, per_host = int(profile.world["nodes"]), int(profile.world["ranks_per_node"])
    batch = float(profile.steps.batch_size or 0)
    low, mid, high = median_of(profile.steps.step_ms)
    waits = input_wait(profile)
    own = 1 - waits if waits > _WAITS else 1.0
    noise = max(_LEAST_NOISE, (high - low) / 4 / mid, profile.steps.noise or 0.0)
    shape = Shape(hosts, per_host, batch / (hosts * per_host))
    rows = [StepTime(shape, mid / 1e3 * own, noise)]
    for count, rate in (profile.world.get("steps_per_s_by_ranks") or {}).items():
        if int(count) != shape.ranks and rate > 0:
            tried = Shape(1, int(count), batch / int(count))
            rows.append(StepTime(tried, 1 / rate * own, _TRIED_NOISE))
    # Steps of one rank on its part of the CPUs, and of several simultaneous ranks, without
    # communication.
    apart = [
        (per_host, step_time.local_batch, step_time.seconds) for step_time in profile.step_times
    ]
    apart += [(item.ranks, item.local_batch, item.seconds) for item in profile.ranks_on_host]
    for ranks, local_batch, seconds in apart:
        if seconds:
            took, spread = _median(seconds)
            alone = Shape(1, ranks, float(local_batch), silent=True)
            rows.append(StepTime(alone, took, max(_TRIED_NOISE, spread)))
    return rows


def _steps_apart(profile: Profile) -> bool:
    return bool(profile.world["size"] > 1 and profile.world["strategy"] == "local_sgd")


def _median(seconds: Sequence[float]) -> tuple[float, float]:
    mid = median(seconds)
    return mid, float(1.25 * np.std(seconds) / len(seconds) ** 0.5 / mid)


def _input(profile: Profile) -> Range | None:
    hosts, per_host = int(profile.world["nodes"]), int(profile.world["ranks_per_node"])
    rate = None
    if input_wait(profile) > _WAITS:
        seconds = median(profile.steps.step_ms) / 1e3
        rate = float(profile.steps.batch_size or 0) / seconds / hosts
    elif could := profile.input.get("samples_per_s"):
        rate = float(could) * per_host
    return None if rate is None else (_INPUT_BAND[0] * rate, _INPUT_BAND[1] * rate)
