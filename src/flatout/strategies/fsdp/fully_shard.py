"""Additions to torch's `fully_shard`: other collectives, and its removal from a model.

If a rank does not come to a collective, the error names the rank and the collective, and the time
of waiting is measured. Ranks of one node send through shared memory. There, weights are copied once
more than within a rank, and gradients are summed directly from other ranks' memory. Sockets would
copy the same numbers several more times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from flatout.strategies.reductions.shared import add_in_order
from flatout.world import Mailbox, World

# Attributes that `fully_shard` sets on a module, and on all modules that it manages.
_STATE = (STATE_KEY, REGISTRY_KEY)
# Index of a module's own class in its MRO, after the classes that `fully_shard` inserts.
_BEHIND = 2
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


class AllGatherOf(DefaultAllGather):
    """Gathers a block's weights."""

    def __init__(self, world: World, what: str) -> None:
        self._world, self._what = world, what

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        work = super().__call__(*args, **{**kwargs, "async_op": True})
        self._world.until(self._world.begun(work, self._what))


class ReduceScatterOf(DefaultReduceScatter):
    """Sums a block's gradients; each rank gets its part."""

    def __init__(self, world: World, what: str) -> None:
        self._world, self._what = world, what

    def __call__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        work = super().__call__(*args, **{**kwargs, "async_op": True})
        self._world.until(self._world.begun(work, self._what))


class SharedAllGather(DefaultAllGather):
    """Gathers a block's weights through shared memory."""

    def __init__(self, world: World, mailbox: Mailbox, what: str) -> None:
        self._world, self._mailbox, self._what = world, mailbox, what

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        """Publish this rank's part, which is in the output, and copy the parts of other ranks."""
        length = input_tensor.nbytes
        self._mailbox.room(length).copy_(input_tensor.view(torch.uint8))
        with self._world.within(self._world.begun(None, self._what)):
            boxes = self._mailbox.meet()
        for rank, part in enumerate(output_tensor.chunk(self._world.size)):
            if rank != self._world.rank:
                part.copy_(boxes[rank][:length].view(part.dtype))


class SharedReduceScatter(DefaultReduceScatter):
    """Sums a block's gradients in shared memory; each rank gets its part."""

    def __init__(self, world: World, mailbox: Mailbox, what: str) -> None:
        self._world, self._mailbox, self._what = world, mailbox, what
        self._is_input = False

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return shared memory for the input of a sum, and in the next call memory for the sum."""
        self._is_input = not self._is_input
        if not self._is_input:
            return super().allocate(size, dtype=dtype, device=device)
        return self._mailbox.room(math.prod(size) * dtype.itemsize).view(dtype)

    def __call__(  # type: ignore[override]
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        with self._world.within(self._world.begun(None, self._what)):
            boxes = self._mailbox.meet()
        length = output_tensor.nbytes
        own = slice(length * self._world.rank, length * (self._world.rank + 1))
        add_in_order([box[own].view(output_tensor.dtype) for box in boxes], output_tensor)


def add_up_unused(block: Any) -> None:
    """Let the gradients of a block's unused parameters count as zeros.

    All ranks then sum the same numbers of values, even if some ranks have not used a parameter.
    torch before 2.13 leaves such gradients out on each rank independently.
    """
    if hasattr(block, "set_reduce_scatter_unused_params"):
        block.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = block._get_fsdp_state()._fsdp_param_group
    if group is None:  # the block gathers no parameters
        return
    post_backward = group.post_backward

    def with_zeros(*unused: Any) -> None:
        for sharded in group.fsdp_params if group.reduce_grads else ():
            if (
                not hasattr(sharded, "_unsharded_param")
                or sharded.unsharded_accumulated_grad is not None
            ):
                continue
            parameter = sharded.unsharded_param
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        post_backward(*unused)

    group.post_backward = with_zeros


def take_off(block: Any) -> None:
    """Remove the hooks and marks of `fully_shard` from a module and all modules that it manages.

    The module keeps its present parameters.
    """
    state = block._get_fsdp_state()
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    # Before torch 2.13, a module has one group of parameters.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in filter(None, groups):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]
    for handle in handles:
        handle.remove()
    _composable_state._module_state_mapping.pop(block, None)
    block.__class__ = type(block).__mro__[getattr(type(block), "_orig_cls_mro_index", _BEHIND)]
    _forget(block, _STATE)
    for module in block.modules():
        _forget(module, _MARKS)


def _forget(module: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        vars(module).pop(name, None)
