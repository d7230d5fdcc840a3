"""Conversion of the hooks' records to an Observation."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flatout.observe.collectives import KIND
from flatout.observe.gpus import memory_mb
from flatout.observe.loaders import SeenLoader
from flatout.observe.meters import Meters
from flatout.observe.models import SeenModel
from flatout.observe.observation import Backbone, Loader, Observation, Site
from flatout.observe.openmp import libraries, settings
from flatout.observe.optimizers import results_of
from flatout.observe.sites import read
from flatout.observe.watch import Watch
from flatout.observe.within_loader import fill, gather
from flatout.world import Place

_PACKAGES = ("torch", "numpy", "torchvision", "keras", "lightning", "accelerate", "transformers")
NO_LOADER = "input: no DataLoader gave the batches trained on; making them is counted as host"
# Maximum number of durations of steps in the file that is written while the script runs.
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
    """Return the Observation so far.

    It is made from the hooks' records without reading any tensor, so any thread may call this.
    """
    steps = watch.lanes.steps
    result = Observation(
        command,
        framework=_framework(watch.frameworks),
        versions=_versions(),
        rank=place.rank,
        world_size=place.world_size,
        threads=_threads(),
        usable_cpus=meters.usable_cpus,
        steps=steps,
        start_s=watch.start_s,
        step_ms=watch.lanes.step_ms(_LIVE_STEPS) if is_live else watch.lanes.step_ms(),
        calls=watch.calls.all(),
        optimizers=results_of(list(watch.optimizers)),
        models=[model.result(steps) for model in _stepped(list(watch.models))],
        backbones=_backbones(list(watch.models)),
        loaders=[
            _with_inside(watch, loader, None if is_live else folder)
            for loader in list(watch.loaders)
            if loader.batches
        ],
        saved=list(watch.saved) if is_live else [_saved(one) for one in watch.saved],
        notes=list(watch.notes),
        ended="running",
    )
    devices = [device for optimizer in result.optimizers for device in optimizer.devices]
    result.device = devices[0] if devices else "cpu"
    torch: Any = sys.modules.get("torch")
    if steps:
        result.cudnn_benchmark = bool(torch.backends.cudnn.benchmark)
        result.matmul_precision = str(torch.get_float32_matmul_precision())
    evaluated = [model.evaluated_at for model in list(watch.models) if model.evaluated_at]
    result.evaluation_site = read(evaluated[0]) if evaluated else None
    if steps and not is_live:
        result.openmp, result.openmp_settings = libraries(), settings()
        result.gpu_memory_mb = memory_mb(torch)
    meters.fill(result)
    _fill_lanes(result, watch)
    read_sites(
        [*result.calls, *result.loaders, *result.optimizers, *result.models, *result.backbones]
    )
    return result


def read_sites(parts: Iterable[Any]) -> None:
    """Read the lines of code of all sites in these parts of an Observation."""
    for part in parts:
        for name, value in vars(part).items():
            if isinstance(value, Site):
                setattr(part, name, read(value))


def _stepped(models: list[SeenModel]) -> list[SeenModel]:
    stepped = [model for model in models if model.is_stepped]
    return [item for item in stepped if not any(item.is_part_of(other) for other in stepped)]


def _backbones(models: list[SeenModel]) -> list[Backbone]:
    # A target network or an average of the weights has the class and size of a trained model, and
    # changes at times.
    trained = {_make(model) for model in models if model.is_stepped}
    return [
        Backbone(model.facts.kind, model.site, model.alone_ms)
        for model in models
        if model.alone_ms is not None and not model.is_stepped and _make(model) not in trained
    ]


def _make(model: SeenModel) -> tuple[str, int, tuple[tuple[str, int], ...]]:
    facts = model.facts
    return facts.kind, facts.elements, tuple(sorted(facts.layers.items()))


def _saved(saved: dict[str, Any]) -> dict[str, Any]:
    return {**saved, "is_there": bool(saved["path"]) and os.path.exists(saved["path"])}


def _with_inside(watch: Watch, loader: SeenLoader, folder: Path | None) -> Loader:
    if folder is not None:
        watch.attempt(loader.compare_with_others)  # this calls the script's own dataset
    facts = loader.result()
    if folder is not None:
        result = gather(folder, loader.number) if facts.num_workers else []
        if loader.looker is not None:
            result.append(loader.looker.probe.as_dict())
        fill(facts, result)
    return facts


def _fill_lanes(observation: Observation, watch: Watch) -> None:
    observation.lanes_ms = dict(watch.lanes.lanes_ms()) if observation.steps else {}
    if not observation.steps:
        return
    if not any(loader.in_training for loader in observation.loaders):
        observation.lanes_ms["input"] = None
        observation.notes.append(NO_LOADER)
    if not observation.models:
        observation.notes.append(
            "models: no module was called in the open that an optimizer steps, as within a "
            "compiled function"
        )
    if observation.world_size > 1:
        _fill_sync(observation)


def _fill_sync(observation: Observation) -> None:
    lanes = observation.lanes_ms
    kinds = {call.kind for call in observation.calls}
    if KIND in kinds and "ddp" not in kinds:
        return
    lanes["host"] = (lanes["host"] or 0.0) + (lanes["sync"] or 0.0)
    lanes["sync"] = None
    observation.notes.append("sync: what the ranks wait for one another is a part of backward")


def _framework(names: set[str]) -> str:
    order = ("flatout", "keras", "lightning", "transformers", "accelerate")
    return next((name for name in order if name in names), "torch")


def _versions() -> dict[str, str]:
    result = {"python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            result[name] = str(version)
    return result


def _threads() -> int | None:
    torch: Any = sys.modules.get("torch")
    return int(torch.get_num_threads()) if hasattr(torch, "get_num_threads") else None
