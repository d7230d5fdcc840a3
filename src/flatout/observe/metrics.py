"""Metrics: functions of sklearn, objects of torchmetrics, metrics of a compiled Keras model."""

from __future__ import annotations

from functools import update_wrapper
from threading import get_ident
from time import perf_counter_ns
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from flatout.hooks import when_imported, wrap
from flatout.observe.frequent_calls import FrequentCalls
from flatout.observe.watch import Watch

# Parts of the names of functions in sklearn.metrics that are no metrics.
_NO_METRIC = ("make_", "get_", "check_", "pairwise_", "distance", "kernel")


class MetricHooks:
    """Timer of metrics; a metric that is called within another metric is not timed itself."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._is_inside = False
        self._often = FrequentCalls(watch)  # Keras calls its metrics twice in each step
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        when_imported("sklearn.metrics", self._hook_sklearn)
        when_imported("torchmetrics.metric", self._hook_torchmetrics)
        when_imported("keras.src.trainers.compile_utils", self._hook_keras)

    def _hook_sklearn(self, module: Any) -> None:
        for name in module.__all__:
            function = getattr(module, name, None)
            if isinstance(function, FunctionType) and not any(part in name for part in _NO_METRIC):
                wrap(module, name, "observe", self._timed, name)
                getattr(module, name).__module__ = module.__name__  # so that pickle finds it

    def _hook_torchmetrics(self, module: Any) -> None:
        owner = module.Metric
        for name in ("_wrap_update", "_wrap_compute"):
            wrap(owner, name, "observe", self._wrapping)

    def _hook_keras(self, module: Any) -> None:
        owner = module.CompileMetrics
        for name in ("update_state", "result"):
            self._often.time(owner, name, "metric", self._timed, None)

    def _wrapping(self, original: Any) -> Any:
        def around(metric: Any, method: Any) -> Any:
            wrapped = original(metric, method)
            return update_wrapper(self._timed(wrapped, type(metric).__name__), wrapped)

        return around

    def _timed(self, original: Any, name: str | None) -> Any:
        lanes, calls = self._watch.lanes, self._watch.calls

        def metric(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or get_ident() != lanes.thread:
                return original(*args, **kwargs)
            self._is_inside = True
            began = perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._is_inside = False
                names = name or self._names_of(args[0])
                if names:
                    calls.note("metric", perf_counter_ns() - began, detail={"name": names})

        return metric

    def _names_of(self, metrics: Any) -> str:
        names = self._names.get(metrics, "")
        if not names:
            names = ", ".join(type(metric).__name__ for metric in metrics.metrics)
            self._names[metrics] = names
        return names
