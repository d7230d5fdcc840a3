"""Switching a user's own optimizer object to torch's fused kernels, and back."""

from __future__ import annotations

from typing import Any

import torch

from flatout.optim.adapter import optimizer_adapter


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch has a fused kernel for this optimizer, its options and its parameters.

    A user's explicit `fused=` or `foreach=` is respected: such an optimizer is left alone.
    """
    return optimizer_adapter(optimizer).can_be_fused


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `fuse` was called on this optimizer, or on one whose state it has loaded."""
    return all(g.get("fused") is True and g.get("foreach") is False for g in optimizer.param_groups)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Use the fused kernel from the next step on; state is kept (rounding differs)."""
    for group in optimizer.param_groups:
        group["fused"] = True
        group["foreach"] = False
        for parameter in group["params"]:
            _move_step(optimizer.state.get(parameter, {}), parameter.device)
    align_state(optimizer)
    # GradScaler reads this to check whether the optimizer can gate a bad step on the device.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def unfuse(optimizer: torch.optim.Optimizer) -> None:
    """Undo `fuse`: torch chooses its plain implementation again."""
    for group in optimizer.param_groups:
        group["fused"] = None
        group["foreach"] = None
        for parameter in group["params"]:
            # The plain implementations read the step count on the host in every step.
            _move_step(optimizer.state.get(parameter, {}), torch.device("cpu"))
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def align_state(optimizer: torch.optim.Optimizer) -> None:
    """Give each state tensor the strides of its parameter.

    Fused kernels read parameter and state in the order of memory. After a change of memory format,
    they would apply a state in the old order to the wrong elements.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if (
                torch.is_tensor(value)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def begins_late(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a parameter gets its first gradient now, later than other parameters.

    torch's fused SGD with momentum fails in this case; its plain implementation does not.
    """
    if type(optimizer) is not torch.optim.SGD:
        return False
    return any(
        group["momentum"]
        and len(
            {
                optimizer.state.get(p, {}).get("momentum_buffer") is None
                for p in group["params"]
                if p.grad is not None
            }
        )
        == 2
        for group in optimizer.param_groups
    )


def _move_step(state: dict[str, Any], device: torch.device) -> None:
    step = state.get("step")
    if step is not None:
        state["step"] = torch.as_tensor(step, dtype=torch.float32, device=device)
