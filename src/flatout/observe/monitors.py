"""Metrics that trainers' callbacks monitor to stop early or to keep the best weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

from flatout.hooks import when_imported, wrap
from flatout.observe.observation import Monitor, Site
from flatout.observe.plateaus import kind_of_name
from flatout.observe.schedules import Schedules
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Effect of each of Keras' callbacks.
_KERAS = {"EarlyStopping": "stops", "ModelCheckpoint": "keeps", "ReduceLROnPlateau": "lowers"}


class Monitors:
    """Record of callbacks of Lightning, Keras and transformers, when a training first uses them.

    Attributes:
        found: a Monitor for each callback.
    """

    def __init__(self, watch: Watch, schedules: Schedules) -> None:
        self._watch = watch
        self._schedules = schedules
        self._sites: dict[int, Site | None] = {}
        self._used: set[int] = set()
        self.found: list[Monitor] = []
        for package in ("lightning.pytorch", "pytorch_lightning"):
            callbacks = f"{package}.callbacks"
            when_imported(f"{callbacks}.early_stopping", self._hook_lightning_stopping)
            when_imported(f"{callbacks}.model_checkpoint", self._hook_lightning_checkpoint)
            when_imported(f"{package}.utilities.types", self._hook_lightning_schedules)
        when_imported("keras.src.callbacks.monitor_callback", self._hook_keras)
        when_imported("transformers.training_args", self._hook_transformers_arguments)
        when_imported("transformers.trainer", self._hook_transformers)

    def _hook_lightning_stopping(self, module: Any) -> None:
        owner = module.EarlyStopping
        wrap(owner, "__init__", "observe", self._making)
        wrap(owner, "setup", "observe", self._before, self._by_lightning, "stops")

    def _hook_lightning_checkpoint(self, module: Any) -> None:
        owner = module.ModelCheckpoint
        wrap(owner, "__init__", "observe", self._making)
        wrap(owner, "setup", "observe", self._before, self._by_lightning, "keeps")

    def _hook_lightning_schedules(self, module: Any) -> None:
        owner = module.LRSchedulerConfig
        wrap(owner, "__init__", "observe", self._configuring)

    def _hook_keras(self, module: Any) -> None:
        owner = module.MonitorCallback
        wrap(owner, "__init__", "observe", self._making)
        wrap(owner, "set_model", "observe", self._before, self._by_keras)

    def _hook_transformers_arguments(self, module: Any) -> None:
        wrap(module.TrainingArguments, "__post_init__", "observe", self._making)

    def _hook_transformers(self, module: Any) -> None:
        wrap(module.Trainer, "train", "observe", self._before, self._by_transformers)

    def _making(self, original: Any) -> Any:
        def make(item: Any, *args: Any, **kwargs: Any) -> None:
            original(item, *args, **kwargs)
            self._sites[id(item)] = here(1)

        return make

    def _before(self, original: Any, look: Callable[..., None], *more: Any) -> Any:
        def call(item: Any, *args: Any, **kwargs: Any) -> Any:
            self._aside(partial(look, item, *more, *args, **kwargs))
            return original(item, *args, **kwargs)

        return call

    def _configuring(self, original: Any) -> Any:
        def configure(config: Any, *args: Any, **kwargs: Any) -> None:
            original(config, *args, **kwargs)
            self._aside(partial(self._of_schedule, config))

        return configure

    def _aside(self, look: Callable[[], None]) -> None:
        if get_ident() == self._watch.lanes.thread:
            self._watch.aside(look, is_once=True)

    def _by_lightning(
        self, callback: Any, acts: str, trainer: Any = None, module: Any = None, stage: str = ""
    ) -> None:
        # Without a metric, the latest checkpoint is kept; save_top_k=-1 keeps all.
        if stage == "fit" and getattr(callback, "save_top_k", 1) > 0:
            self._note(callback, callback.monitor, callback.mode, acts, default="min")

    def _of_schedule(self, config: Any) -> None:
        scheduler = config.scheduler
        if config.reduce_on_plateau:
            self._sites[id(scheduler)] = self._schedules.made_at(scheduler)
            self._note(scheduler, config.monitor, scheduler.mode, "lowers", default="min")

    def _by_keras(self, callback: Any, model: Any = None) -> None:
        names = (kind.__name__ for kind in type(callback).__mro__)
        acts = next((_KERAS[name] for name in names if name in _KERAS), "")
        # In mode "auto" Keras chooses the direction itself.
        if acts and callback.mode in ("min", "max") and getattr(callback, "save_best_only", True):
            self._note(callback, callback.monitor, callback.mode, acts)

    def _by_transformers(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        asked = trainer.args
        if asked.load_best_model_at_end:
            metric = asked.metric_for_best_model
            mode = "max" if asked.greater_is_better else "min"
            default = "min" if str(metric).endswith("loss") else "max"
            self._note(asked, metric, mode, "keeps", default=default)

    def _note(self, item: Any, metric: Any, mode: str, acts: str, *, default: str = "") -> None:
        if not metric or id(item) in self._used:
            return
        self._used.add(id(item))
        monitor = Monitor(type(item).__name__, str(metric), mode, kind_of_name(str(metric)), acts)
        monitor.is_default = mode == default
        monitor.site = self._sites.get(id(item)) or here()
        self.found.append(monitor)
