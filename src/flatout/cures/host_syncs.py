"""script.host_syncs=deferred: numbers read from a GPU in each step are fetched when used.

The copy to the host is queued where the script reads the number, so that the script gets the value
of that moment. Only the wait for the device's queued work is skipped.
"""

from __future__ import annotations

import json
from threading import get_ident
from typing import Any

from flatout.cures.later import DeferredNumber
from flatout.cures.record import is_on, leave, took
from flatout.cures.steps import ScriptSteps, caller
from flatout.hooks import wrap
from flatout.observe import is_users

FIELD = "script.host_syncs"


def defer(torch: Any, steps: ScriptSteps) -> None:
    """Hook into Tensor.item, for calls that the script makes in each step.

    `float(tensor)`, `if tensor:` and similar uses need the number at once: they stay as written.
    """
    if not torch.cuda.is_available():
        leave(FIELD, "there is no GPU to wait for")
        return
    wrap(torch.Tensor, "item", "cures", _deferred, torch, steps)
    wrap(json.JSONEncoder, "default", "cures", _as_number)


def _deferred(original: Any, torch: Any, steps: ScriptSteps) -> Any:
    is_compiling = torch.compiler.is_compiling

    def item(tensor: Any) -> Any:
        if not tensor.is_cuda or is_compiling() or get_ident() != steps.thread or not is_on():
            return original(tensor)
        if tensor.numel() != 1 or tensor.is_complex():
            return original(tensor)
        file, *place = caller()
        if not is_users(file) or not steps.is_in_each((FIELD, *place)):
            return original(tensor)
        took(FIELD, "numbers from the GPU are fetched when they are used")
        return _later(torch, tensor, original)

    return item


def _later(torch: Any, tensor: Any, item: Any) -> DeferredNumber:
    host = torch.empty((), dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach().reshape(()), non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))

    def fetch() -> Any:
        event.synchronize()
        return item(host)

    if tensor.dtype is torch.bool:
        kind: type = bool
    else:
        kind = float if tensor.is_floating_point() else int
    return DeferredNumber(fetch, event.query, kind)


def _as_number(original: Any) -> Any:
    def default(encoder: Any, value: Any) -> Any:
        return value.value if type(value) is DeferredNumber else original(encoder, value)

    return default
