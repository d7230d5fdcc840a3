"""compute.precision: runs forward under autocast, or without the script's own autocast."""

from __future__ import annotations

from typing import Any

from flatout.cures.record import is_on, leave, took
from flatout.cures.roots import Call, Cure
from flatout.cures.steps import ScriptSteps
from flatout.hooks import wrap

FIELD = "compute.precision"


def autocast(torch: Any, steps: ScriptSteps) -> Cure | None:
    """Return the wrapper for calls of root modules; None if there is none."""
    match steps.asked[FIELD]:
        case "bf16":
            return in_bf16
        case "fp32":
            without_autocast(torch)
        case "fp16":
            leave(FIELD, "fp16 needs a scaled loss, which only the script itself can add")
    return None


def in_bf16(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Call:
    """Wrap calls of a root module in bfloat16 autocast, and convert bfloat16 outputs to float32.

    So the script's loss is computed as written. The script's own autocast takes precedence.
    """
    import torch

    reason = _against(torch, module)
    if reason:
        leave(FIELD, reason)
        return call
    device = next(module.parameters()).device.type
    is_enabled, bf16 = torch.is_autocast_enabled, torch.bfloat16

    def cast(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_enabled(device):
            leave(FIELD, "the script has its own autocast")
            return call(module, *args, **kwargs)
        with torch.autocast(device, bf16):
            output = call(module, *args, **kwargs)
        return in_fp32(output)

    took(FIELD, f"bf16 in {type(module).__name__}")
    return cast


def _against(torch: Any, module: Any) -> str:
    parameters = list(module.parameters())
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    name = type(module).__name__
    if dtypes != {torch.float32}:
        words = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"the parameters of {name} are {words}"
    kinds = {p.device.type for p in parameters}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        return f"{name} is on {', '.join(sorted(kinds))}"
    if kinds == {"cuda"} and not torch.cuda.is_bf16_supported():
        return "this GPU has no bfloat16"
    return ""


def in_fp32(output: Any) -> Any:
    """Return the output with bfloat16 tensors converted to float32."""
    import torch
    from torch.utils._pytree import tree_map_only

    def cast(tensor: Any) -> Any:
        return tensor.float() if tensor.dtype is torch.bfloat16 else tensor

    if isinstance(output, torch.Tensor):
        return cast(output)
    return tree_map_only(torch.Tensor, cast, output)


def without_autocast(torch: Any) -> None:
    """Make the script's autocasts do nothing."""

    def around(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if is_on() and self._enabled:
                self._enabled = False
                took(FIELD, "fp32 in place of autocast")

        return init

    wrap(torch.autocast, "__init__", "cures", around)
