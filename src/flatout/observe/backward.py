"""Hook that times backward passes, and passes their losses to the detectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flatout.hooks import wrap
from flatout.observe.lanes import AFTER, BACKWARD, OPTIMIZER
from flatout.observe.optimizers import StepFinder
from flatout.observe.sites import here
from flatout.observe.watch import Watch


def watch_backward(torch: Any, watch: Watch, steps: StepFinder) -> None:
    """Hook into torch.autograd.backward, which Tensor.backward calls."""
    is_traced = torch.compiler.is_dynamo_compiling
    hook = wrap(torch.autograd, "backward", "observe", _timed, watch, steps, is_traced)
    watch.quick.hooks.append(hook)


def _timed(original: Any, watch: Watch, steps: StepFinder, is_traced: Callable[[], bool]) -> Any:
    lanes, enter, calls = watch.lanes, watch.lanes.enter, watch.calls
    leave = lanes.leave_backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        # First, so that none of the code below is traced.
        if is_traced() or lanes.current == BACKWARD or (before := enter(BACKWARD)) < 0:
            original(tensors, *args, **kwargs)
            return
        began = lanes.last
        if lanes.loader is not None:
            lanes.loader.in_training = lanes.is_trained_on = True
        if watch.is_beginning:
            looks = [partial(look, tensors) for look in watch.before_backward]
            watch.aside(*looks, is_once=True)
        try:
            original(tensors, *args, **kwargs)
        finally:
            # LBFGS calls backward within its step.
            leave(OPTIMIZER if before == OPTIMIZER else AFTER)
            if steps.backward_site is None:
                steps.backward_site = here(1)
        if kwargs.get("retain_graph") or (len(args) > 1 and args[1]):
            calls.note("backward", lanes.last - began, detail={"retain_graph": True})

    return watch.quick.backward(original, backward)
