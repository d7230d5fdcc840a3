"""Takes torch's `fully_shard` off a module: torch itself has no way back (as of 2.13)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

# What fully_shard writes down on a module, and on all that it manages.
_STATE = (STATE_KEY, REGISTRY_KEY)
# Where a module's own class is behind those that fully_shard puts before it.
_BEHIND = 2
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def take_off(block: Any) -> None:
    """Take hooks and marks off a module that `fully_shard` was called on, and all it manages.

    Its parameters stay those that stand there now.
    """
    state = block._get_fsdp_state()
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    # A module has one group of parameters before torch 2.13.
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
