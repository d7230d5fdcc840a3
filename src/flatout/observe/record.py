"""From what the hooks have seen to an Observation."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flatout.observe.gpus import memory_mb
from flatout.observe.loaders import SeenLoader
from flatout.observe.meters import Meters
from flatout.observe.models import SeenModel
from flatout.observe.observation import Backbone, Loader, Observation, Site
from flatout.observe.openmp import libraries, settings
from flatout.observe.sites import read
from flatout.observe.watch import Watch
from flatout.observe.within_loader import fill, gather
from flatout.world import Place

_PACKAGES = ("torch", "numpy", "torchvision", "keras", "lightning", "accelerate", "transformers")
NO_LOADER = "input: no DataLoader gave the batches trained on; making them is counted as host"
# Durations of steps in what is written while the script runs.
_LIVE_STEPS = 200


def observation(
    watch: Watch,
    meters: Meters,
    command: list[str],
    place: Place,
    folder: Path,
    *,
    is_live: bool,
) -> Observation:
    """What was seen so far. Reads what hooks write, and never a tensor: any thread may call it."""
    steps = watch.lanes.steps
    seen = Observation(
        command,
        framework=_framework(watch.frameworks),
        versions=_versions(),
        rank=place.rank,
        world_size=place.world_size,
        threads=_threads(),
        usable_cpus=meters.usable_cpus,
        steps=steps,
        step_ms=watch.lanes.step_ms(_LIVE_STEPS) if is_live else watch.lanes.step_ms(),
        calls=watch.calls.all(),
        optimizers=[optimizer.result() for optimizer in list(watch.optimizers)],
        models=[model.result(steps) for model in _stepped(list(watch.models))],
        backbones=_backbones(list(watch.models)),
        loaders=[
            _with_inside(loader, None if is_live else folder)
            for loader in list(watch.loaders)
            if loader.batches
        ],
        saved=list(watch.saved),
        notes=list(watch.notes),
        ended="running",
    )
    devices = [device for optimizer in seen.optimizers for device in optimizer.devices]
    seen.device = devices[0] if devices else "cpu"
    torch: Any = sys.modules.get("torch")
    if steps:
        seen.cudnn_benchmark = bool(torch.backends.cudnn.benchmark)
        seen.matmul_precision = str(torch.get_float32_matmul_precision())
    evaluated = [model.evaluated_at for model in list(watch.models) if model.evaluated_at]
    seen.evaluation_site = read(evaluated[0]) if evaluated else None
    if steps and not is_live:
        seen.openmp, seen.openmp_settings = libraries(), settings()
        seen.gpu_memory_mb = memory_mb(torch)
    meters.fill(seen)
    _fill_lanes(seen, watch)
    read_sites([*seen.calls, *seen.loaders, *seen.optimizers, *seen.models, *seen.backbones])
    return seen


def read_sites(parts: Iterable[Any]) -> None:
    """Reads the lines that these parts of an Observation name."""
    for part in parts:
        for name, value in vars(part).items():
            if isinstance(value, Site):
                setattr(part, name, read(value))


def _stepped(models: list[SeenModel]) -> list[SeenModel]:
    stepped = [model for model in models if model.is_stepped]
    return [one for one in stepped if not any(one.is_part_of(other) for other in stepped)]


def _backbones(models: list[SeenModel]) -> list[Backbone]:
    return [
        Backbone(model.facts.kind, model.site, model.alone_ms)
        for model in models
        if model.alone_ms is not None and not model.is_stepped
    ]


def _with_inside(seen: SeenLoader, folder: Path | None) -> Loader:
    """A loader's facts; with those of its workers, which are read once, at the end."""
    facts = seen.result()
    if folder is not None:
        told = gather(folder, seen.number) if facts.num_workers else []
        if seen.looker is not None:
            told.append(seen.looker.probe.as_dict())
        fill(facts, told)
    return facts


def _fill_lanes(seen: Observation, watch: Watch) -> None:
    seen.lanes_ms = dict(watch.lanes.lanes_ms()) if seen.steps else {}
    if not seen.steps:
        return
    if not any(loader.in_training for loader in seen.loaders):
        seen.lanes_ms["input"] = None
        seen.notes.append(NO_LOADER)
    if not seen.models:
        seen.notes.append(
            "models: no module was called in the open that an optimizer steps, as within a "
            "compiled function"
        )
    if seen.world_size > 1:
        seen.lanes_ms["sync"] = None
        seen.notes.append("sync: what the ranks wait for one another is a part of backward")


def _framework(names: set[str]) -> str:
    order = ("flatout", "keras", "lightning", "transformers", "accelerate")
    return next((name for name in order if name in names), "torch")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def _threads() -> int | None:
    torch: Any = sys.modules.get("torch")
    return int(torch.get_num_threads()) if hasattr(torch, "get_num_threads") else None
