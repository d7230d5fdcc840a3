"""compute.memory_format=channels_last: stores images in the layout best for convolutions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from flatout.cures.record import leave, took
from flatout.cures.roots import Call, Cure
from flatout.cures.steps import ScriptSteps

FIELD = "compute.memory_format"


def channels_last(torch: Any, steps: ScriptSteps) -> Cure:
    """Convert a root module with convolutions to channels_last, and its 4-D inputs at each call."""

    def cure(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Call:
        from torch.utils._pytree import tree_leaves, tree_map_only

        from flatout.models import guarding_group_norms, lay_out, uses_convolution
        from flatout.optim import align_state

        name = type(module).__name__

        def is_image(value: Any) -> bool:
            return (
                isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()
            )

        if not uses_convolution(module):
            leave(FIELD, f"no convolution in {name}")
            return call
        if not any(is_image(leaf) for leaf in tree_leaves((args, kwargs))):
            leave(FIELD, f"{name} takes no images")
            return call
        if isinstance(module, torch.jit.ScriptModule) or "FullyShardedDataParallel" in name:
            leave(FIELD, f"{name} holds its weights in its own form")
            return call
        lay_out(module, torch.channels_last)
        for optimizer in steps.optimizers():
            align_state(optimizer)

        def laid_out(value: Any) -> Any:
            if not is_image(value):
                return value
            return value.contiguous(memory_format=torch.channels_last)

        def with_images(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(torch.Tensor, laid_out, (args, kwargs))
            with guarding_group_norms(nullcontext()):
                return call(module, *args, **kwargs)

        took(FIELD, f"channels_last in {name}")
        return with_images

    return cure
