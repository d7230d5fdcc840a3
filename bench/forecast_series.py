"""Published series of training speed: `published_series/` has a file of TOML for each source."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from flatout.forecast.job import GPU_SUMS, Job, Prior, Range, Shape, StepTime, cut

NETWORKS: dict[str, Range] = {"tcp": (0.45, 0.75), "rdma": (0.5, 0.95), "about": (0.45, 1.5)}
"""What share of a link's line rate collectives reach, by the kind of network.

TCP and RDMA as measured elsewhere; "about" is for line rates that are not known well, a guess from
before any series was judged.
"""
_INSIDE: Range = (0.1, 0.9)
# From what is published a file's rate is not known: it may be the limit, or ten times as fast.
_INPUT: Range = (1.0, 10.0)
_JUST_MORE = 1.01
# Images per second that a worker of torch's DataLoader decodes by Pillow, crops and resizes for
# ImageNet: a core of an i7 (rom1504/img2dataset#127), and one of an EPYC of 2024
# (`bench/forecast_accuracy.py --worker`).
WORKER: Range = (80.0, 320.0)
# Bytes per second that pass TensorFlow's gRPC, which packs and copies each tensor: the least that
# was measured with one worker in 2017 (tensorflow/tensorflow#6116), and, there too, what passes
# where nothing is copied.
GRPC: Range = (2.5e8, 3.4e9)


@dataclass(frozen=True)
class Series:
    """One model on one system, at several sizes.

    Attributes:
        source: of the file.
        name: of the series.
        is_judged: whether the model was not built with it.
        system: in words.
        unit: of the rate.
        per_host: devices of a full host.
        shapes: the sizes, the smallest first.
        rates: units per second at each.
        job: what a step sends.
        prior: of its machines.
        reads_files: whether samples come from files.
        workers: that read them on a host, each on a core; 0 where that is not known.
    """

    source: str
    name: str
    is_judged: bool
    system: str
    unit: str
    per_host: int
    shapes: tuple[Shape, ...]
    rates: tuple[float, ...]
    job: Job
    prior: Prior
    reads_files: bool
    workers: int

    def row(self, place: int) -> StepTime:
        """The time of a step at a size."""
        shape = self.shapes[place]
        return StepTime(shape, shape.samples / self.rates[place])


@dataclass(frozen=True)
class Source:
    """A file of `published_series/`.

    Attributes:
        name: of the source.
        where: it was published.
        remark: what is to be known of it.
        series: that it holds.
    """

    name: str
    where: str
    remark: str
    series: tuple[Series, ...]


@cache
def sources() -> tuple[Source, ...]:
    """All files, by their names."""
    files = sorted(Path(__file__).with_name("published_series").glob("*.toml"))
    return tuple(_source(tomllib.loads(file.read_text("utf-8"))) for file in files)


def series() -> Iterator[Series]:
    """Those of all files."""
    for source in sources():
        yield from source.series


def _source(data: dict[str, Any]) -> Source:
    made = tuple(_series(data, item, data["systems"][item["system"]]) for item in data["series"])
    return Source(data["source"], data["where"], data["remark"], made)


def _series(data: dict[str, Any], value: dict[str, Any], system: dict[str, Any]) -> Series:
    per_host, count = system["devices_per_host"], len(value["devices"])
    batches = value["batch"] if isinstance(value["batch"], list) else [value["batch"]] * count
    accumulated = value.get("accumulated", [1] * count)
    servers = value.get("servers")
    shapes = tuple(
        Shape(
            hosts=max(1, devices // per_host),
            per_host=min(devices, per_host),
            batch=float(batches[place]),
            accumulated=accumulated[place],
            servers=servers[place] if servers else max(1, devices // per_host),
        )
        for place, devices in enumerate(value["devices"])
    )
    return Series(
        source=data["source"],
        name=value["name"],
        is_judged=_is_judged(data["used_for"]),
        system=system["is"],
        unit=data["unit"],
        per_host=per_host,
        shapes=shapes,
        rates=tuple(map(float, value["rate"])),
        job=Job(
            buckets=cut(value["gradient_mb"] * 1e6),
            batch=shapes[0].batch,
            strategy=system.get("strategy", "ddp"),
            reduction=system.get("reduction", "all_reduce"),
            largest=value.get("largest_tensor_mb", 0) * 1e6,
            row_bytes=value.get("row_kb", 0) * 1e3,
        ),
        prior=_prior(system),
        reads_files=value.get("reads_files", False),
        workers=min(value.get("loader_workers", 0), system.get("cores", 0)),
    )


def _is_judged(used_for: Literal["building", "judging"]) -> bool:
    return {"building": False, "judging": True}[used_for]


def _prior(system: dict[str, Any]) -> Prior:
    low, high = (share * system["inside_gbyte_s"] * 1e9 for share in _INSIDE)
    nic = None
    if "network" in system:
        line = system["network_gbit_s"] / 8 * 1e9
        least, most = NETWORKS[system["network"]]
        nic = (least * line, most * line)
    prior = Prior(nic=nic, inside=(low, high))
    # Servers add up on CPUs, and so do hosts without RDMA that send from memory.
    if system.get("sent_by") == "grpc":
        return replace(prior, summing=GRPC)
    on_gpus = system.get("network") == "rdma" and system.get("strategy") != "parameter_server"
    return replace(prior, summing=GPU_SUMS) if on_gpus else prior


def with_input(series: Series, fastest: float) -> Prior:
    """What a host can read, where samples come from files."""
    low, high = (share * fastest for share in _INPUT)
    if series.workers:
        low = max(low, series.workers * WORKER[0])
        high = max(_JUST_MORE * low, min(high, series.workers * WORKER[1]))
    return replace(series.prior, input=(low, high))
