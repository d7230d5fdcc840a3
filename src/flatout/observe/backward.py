"""Backward passes."""

from __future__ import annotations

from functools import wraps
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from flatout.observe.lanes import AFTER, BACKWARD, OPTIMISER
from flatout.observe.optimizers import Steps
from flatout.observe.sites import here
from flatout.observe.watch import Watch


def watch_backward(torch: Any, watch: Watch, steps: Steps) -> None:
    """Hooks into torch.autograd.backward, which Tensor.backward calls."""
    lanes, spent, calls = watch.lanes, watch.lanes.spent, watch.calls
    original, is_traced = torch.autograd.backward, torch.compiler.is_dynamo_compiling

    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if is_traced() or get_ident() != lanes.thread or lanes.current == BACKWARD:
            original(tensors, *args, **kwargs)
            return
        before, began = lanes.current, perf_counter_ns()
        spent[before] += began - lanes.last
        lanes.last = began
        lanes.current = BACKWARD
        if lanes.loader is not None:
            lanes.loader.in_training = True
        try:
            original(tensors, *args, **kwargs)
        finally:
            lanes.backwards += 1
            steps.backwards += 1
            now = perf_counter_ns()
            spent[lanes.current] += now - lanes.last
            lanes.last = now
            if steps.backward_site is None:
                steps.backward_site = here(1)
            # LBFGS calls it within its step.
            lanes.current = OPTIMISER if before == OPTIMISER else AFTER
        if kwargs.get("retain_graph") or (len(args) > 1 and args[1]):
            calls.note("backward", now - began, detail={"retain_graph": True})

    torch.autograd.backward = backward
