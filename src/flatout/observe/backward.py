"""Backward passes."""

from __future__ import annotations

from functools import wraps
from typing import Any

from flatout.observe.lanes import AFTER, BACKWARD, OPTIMIZER
from flatout.observe.optimizers import Steps
from flatout.observe.sites import here
from flatout.observe.watch import Watch


def watch_backward(torch: Any, watch: Watch, steps: Steps) -> None:
    """Hooks into torch.autograd.backward, which Tensor.backward calls."""
    lanes, enter, calls = watch.lanes, watch.lanes.enter, watch.calls
    leave = lanes.leave_backward
    original, is_traced = torch.autograd.backward, torch.compiler.is_dynamo_compiling

    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        # Asked first: nothing of ours is traced.
        if is_traced() or lanes.current == BACKWARD or (before := enter(BACKWARD)) < 0:
            original(tensors, *args, **kwargs)
            return
        began = lanes.last
        if lanes.loader is not None:
            lanes.loader.in_training = lanes.is_trained_on = True
        try:
            original(tensors, *args, **kwargs)
        finally:
            # LBFGS calls it within its step.
            leave(OPTIMIZER if before == OPTIMIZER else AFTER)
            if steps.backward_site is None:
                steps.backward_site = here(1)
        if kwargs.get("retain_graph") or (len(args) > 1 and args[1]):
            calls.note("backward", lanes.last - began, detail={"retain_graph": True})

    torch.autograd.backward = backward
    watch.quick.stand_for_backward(torch.autograd, original, backward)
