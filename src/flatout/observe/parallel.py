"""Calls of a script that concern several devices and ranks."""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns
from typing import Any

from flatout.hooks import wrap
from flatout.observe.watch import Watch


def watch_parallel(torch: Any, watch: Watch) -> None:
    """Hook into torch's wrappers of models, DistributedSampler and the count of devices."""
    parallel = torch.nn.parallel
    sampler = torch.utils.data.distributed.DistributedSampler
    for owner, name, kind in (
        (parallel.DataParallel, "__init__", "data_parallel"),
        (parallel.DistributedDataParallel, "__init__", "ddp"),
        (torch.optim.Optimizer, "__init__", "optimizer"),
        (torch, "set_num_threads", "threads"),
        (parallel.DistributedDataParallel, "no_sync", "no_sync"),
        (sampler, "set_epoch", "set_epoch"),
        (torch.cuda, "device_count", "device_count"),
        (torch.cuda, "init", "device_count"),
    ):
        wrap(owner, name, "observe", _noted, kind, watch)


def _noted(original: Any, kind: str, watch: Watch) -> Any:
    lanes, calls = watch.lanes, watch.calls

    def call(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter_ns()
        value = original(*args, **kwargs)
        if get_ident() == lanes.thread:
            calls.note(kind, perf_counter_ns() - began)
        return value

    return call
