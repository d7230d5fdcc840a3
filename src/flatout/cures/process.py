"""Settings of the whole process: threads, affinity, denormals, allocator."""

from __future__ import annotations

import os
from threading import get_ident
from typing import Any

from flatout.cures.record import is_on, leave, took, words_of
from flatout.cures.steps import ScriptSteps
from flatout.devices import allocator
from flatout.devices import process as settings
from flatout.hooks import wrap
from flatout.recipe import Process


def set_up(torch: Any, steps: ScriptSteps) -> None:
    """Apply the Recipe's settings of the process right after torch is loaded, as a Loop does."""
    fields = [field for field in steps.asked if field.startswith("process.")]
    late = settings.apply(Process(**{f.partition(".")[2]: steps.asked[f] for f in fields}))
    for field in fields:
        value = steps.asked[field]
        reason = next((words for words in late if words.startswith(field)), "")
        if reason:
            leave(field, reason)
        else:
            took(field, words_of(field, value))
            if field == "process.threads":
                wrap(torch, "set_num_threads", "cures", _keeping_threads, steps, value)
            elif field == "process.interop_threads":
                wrap(torch, "set_num_interop_threads", "cures", _keeping_interop_threads)


def _keeping_threads(original: Any, steps: ScriptSteps, count: int) -> Any:
    process = os.getpid()

    def set_num_threads(wanted: int) -> None:
        is_setting_up = not steps.count and get_ident() == steps.thread
        gives_way = is_setting_up and os.getpid() == process and is_on()
        original(count if gives_way else wanted)

    return set_num_threads


def _keeping_interop_threads(original: Any) -> Any:
    process = os.getpid()

    def set_num_interop_threads(wanted: int) -> None:
        if os.getpid() != process or not is_on():
            original(wanted)

    return set_num_interop_threads


def keep_memory(torch: Any, steps: ScriptSteps) -> None:
    """Make the allocator keep freed memory, if the allocator is glibc's."""
    if allocator.current() == "keep" or allocator.keep_memory():
        took("memory.allocator", "allocator=keep")
    else:
        leave("memory.allocator", "glibc's allocator does not serve this process")
