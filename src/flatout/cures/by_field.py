"""The cure of each field of a Recipe that can apply to a script written without Flatout."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class FieldCure(NamedTuple):
    """A function that applies a field to a script; fields of the same function share one call.

    Attributes:
        module: file of this room that defines the function. Some import torch, so they are imported
            once the script has imported it.
        function: takes torch and a `ScriptSteps`.
        around: position of the wrapper that the function returns around calls of the script's
            models, the lowest first; 0 for a function that returns none.
        of_plain: the plain value is a cure too, since a script may be written otherwise.
    """

    module: str
    function: str
    around: int = 0
    of_plain: bool = False

    def load(self) -> Callable[[Any, Any], Any]:
        """Return the function."""
        result: Callable[[Any, Any], Any] = getattr(
            import_module(f"flatout.cures.{self.module}"), self.function
        )
        return result


_PROCESS, _LOADERS = FieldCure("process", "set_up"), FieldCure("loaders", "Loaders")

CURES = {
    "compute.precision": FieldCure("precision", "autocast", around=5, of_plain=True),
    "compute.memory_format": FieldCure("memory_format", "channels_last", around=4),
    "compute.rewrites": FieldCure("rewrites", "cure", around=2),
    "compute.fused_optimizer": FieldCure("fused", "fuse_steps"),
    "compute.touched_rows": FieldCure("touched_rows", "step_rows"),
    "compute.compile": FieldCure("compile", "cure", around=3),
    "compute.matmul_precision": FieldCure("backends", "set_matmul_precision"),
    "memory.allocator": FieldCure("process", "keep_memory"),
    "process.threads": _PROCESS,
    "process.interop_threads": _PROCESS,
    "process.affinity": _PROCESS,
    "process.flush_denormals": _PROCESS,
    "input.workers": _LOADERS._replace(of_plain=True),
    "input.pin_memory": _LOADERS,
    "script.persistent_workers": _LOADERS,
    "script.cache": FieldCure("cache", "keep_samples"),
    "script.features": FieldCure("features", "cure", around=1),
    "script.zero_grad": FieldCure("zero_grad", "drop_gradients"),
    "script.garbage": FieldCure("garbage", "Garbage"),
    "script.empty_cache": FieldCure("empty_cache", "skip_empty_cache"),
    "script.host_syncs": FieldCure("host_syncs", "defer"),
    "script.log_every": FieldCure("log_every", "Log"),
    "script.evaluation": FieldCure("evaluation", "without_graph", around=6),
    "script.cudnn_benchmark": FieldCure("backends", "benchmark_cudnn"),
    "script.unused_parameters": FieldCure("ddp", "Search"),
    "script.gradient_sync": FieldCure("ddp", "Accumulation"),
}
"""Cures by the dotted name of the field."""
