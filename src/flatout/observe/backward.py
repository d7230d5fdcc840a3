"""Backward passes."""

from __future__ import annotations

from functools import wraps
from threading import get_ident
from typing import Any

from flatout.observe.lanes import AFTER, BACKWARD, OPTIMISER
from flatout.observe.optimizers import Steps
from flatout.observe.watch import Watch


def watch_backward(torch: Any, watch: Watch, steps: Steps) -> None:
    """Hooks into torch.autograd.backward, which Tensor.backward calls."""
    lanes, calls = watch.lanes, watch.calls
    original, is_compiling = torch.autograd.backward, torch.compiler.is_compiling

    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if is_compiling() or get_ident() != lanes.thread or lanes.current == BACKWARD:
            original(tensors, *args, **kwargs)
            return
        before = lanes.switch(BACKWARD)
        began = lanes.last
        if lanes.loader is not None:
            lanes.loader.in_training = True
        try:
            original(tensors, *args, **kwargs)
        finally:
            lanes.backwards += 1
            steps.backwards += 1
            # LBFGS calls it within its step.
            lanes.switch(OPTIMISER if before == OPTIMISER else AFTER)
        if kwargs.get("retain_graph") or (len(args) > 1 and args[1]):
            calls.note("backward", lanes.last - began, detail={"retain_graph": True})

    torch.autograd.backward = backward
