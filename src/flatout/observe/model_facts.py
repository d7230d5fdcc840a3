"""Facts about a module: its layers, layout and wrappers, and numbers that are not finite."""

from __future__ import annotations

from collections import Counter
from math import gcd, prod
from typing import Any

from flatout.models import two_mode_layers
from flatout.observe.observation import Model

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
# Names of wrapper modules that hold the model as `module` or `_orig_mod`.
_HOLDERS = {*_WRAPPERS, "AveragedModel", "OptimizedModule"}
# Maximum number of names of tensors with NaN or infinity.
_NAMED = 20
# _KEPT: maximum number of a model's parameters to which references are kept; _SMALL_BYTES: maximum
# bytes of each such parameter.
_KEPT, _SMALL_BYTES = 4, 2**16


def unwrapped(module: Any) -> list[Any]:
    """Return the module, and the modules that its wrappers hold, outermost first."""
    result: list[Any] = []
    while module is not None and len(result) < 4:
        result.append(module)
        inside = module.__dict__.get("_modules", {})
        is_holder = any(kind.__name__ in _HOLDERS for kind in type(module).__mro__)
        names = ("module", "_orig_mod") if is_holder else ()
        module = next((inside[name] for name in names if name in inside), None)
    return result


def without_ddp(module: Any) -> Any:
    """Return the model in a DistributedDataParallel, whose own forward waits for no other rank."""
    is_wrapped = type(module).__name__ == "DistributedDataParallel"
    return module.module if is_wrapped else module


def describe(module: Any, facts: Model, *, whole: bool) -> None:
    """Fill in the facts about a module; with `whole` also check whether its numbers are finite."""
    parameters = list(module.parameters())
    facts.elements = sum(tensor.numel() for tensor in parameters)
    facts.device_type = parameters[0].device.type if parameters else "cpu"
    modules = list(module.modules())
    kinds = Counter(type(inner).__name__ for inner in modules)
    dropping = (type(inner).__name__ for inner in modules if drops_within(inner))
    facts.layers = dict(kinds + Counter(f"Dropout in {kind}" for kind in dropping))
    if facts.is_told:  # Keras has layers that are no submodules
        facts.layers |= Counter(two_mode_layers(module))
    wrappers = [type(outer).__name__ for outer in unwrapped(module)]
    facts.wrapper = next((name for name in wrappers if name in _WRAPPERS), "")
    facts.is_compiled = "OptimizedModule" in wrappers or any(
        getattr(inner, "_compiled_call_impl", None) is not None for inner in modules
    )
    for outer in unwrapped(module):
        if type(outer).__name__ == "DistributedDataParallel":
            facts.wrapper_options = _ddp_options(outer)
        elif type(outer).__name__ == "DataParallel":
            facts.wrapper_options = {"devices": len(outer.device_ids)}
    images = [tensor for tensor in parameters if tensor.dim() == 4 and tensor.shape[2:].numel() > 1]
    facts.has_convolutions = any(name.startswith(("Conv", "LazyConv")) for name in kinds)
    facts.is_channels_last = bool(images) and all(_is_channels_last(tensor) for tensor in images)
    # Keras layers cast their inputs themselves.
    casts = {getattr(inner, "compute_dtype", None) for inner in modules} & {"bfloat16", "float16"}
    facts.autocast = facts.autocast or str(next(iter(casts), ""))
    if whole:
        facts.not_finite = sorted({*facts.not_finite, *not_finite(module)})[:_NAMED]


def drops_within(module: Any) -> bool:
    """Return whether a layer other than Dropout drops numbers in train mode.

    Such a layer may drop between the layers of a recurrent network, within attention, or by a
    function that its forward calls.
    """
    share = getattr(module, "dropout", None)
    if isinstance(share, int | float):
        return share > 0 and getattr(module, "num_layers", 2) > 1
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and {"dropout", "training"} <= set(code.co_names)


def not_finite(module: Any) -> list[str]:
    """Return the names of parameters with NaN or infinity, and of buffers with NaN.

    Tensors that are not trained may hold infinity on purpose, as a mask does, but not NaN.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    return [
        name for name, tensor in named if _is_broken(local(tensor), also_inf=tensor.requires_grad)
    ]


def kept_of(module: Any) -> list[tuple[str, Any]]:
    """Return the smallest trainable parameters, to be read after the module no longer exists."""
    small = [
        (name, tensor.detach())
        for name, tensor in module.named_parameters()
        if tensor.requires_grad and local(tensor) is tensor and _is_small(tensor)
    ]
    return sorted(small, key=lambda item: int(item[1].numel()))[:_KEPT]


def _is_small(tensor: Any) -> bool:
    is_plain = type(tensor.data).__name__ == "Tensor" and not tensor.is_meta
    is_plain = is_plain and str(tensor.layout) == "torch.strided"
    return is_plain and 0 < tensor.untyped_storage().nbytes() <= _SMALL_BYTES


def broken_of(kept: list[tuple[str, Any]]) -> list[str]:
    """Return the names of kept parameters with NaN or infinity."""
    there = [(name, tensor) for name, tensor in kept if tensor.untyped_storage().nbytes()]
    return [name for name, tensor in there if _is_broken(tensor, also_inf=True)]


def _is_broken(tensor: Any, *, also_inf: bool) -> bool:
    if not tensor.is_floating_point() or tensor.is_meta:
        return False
    tensor = tensor.detach()
    try:
        if bool(tensor.sum().isfinite()):
            return False  # any NaN or infinity would remain in the sum
        return not bool(tensor.isfinite().all()) if also_inf else bool(tensor.isnan().any())
    except RuntimeError:  # a dtype for which torch lacks the operator
        return False


def local(tensor: Any) -> Any:
    """Return this rank's part of a distributed tensor; the whole tensor would need other ranks."""
    return getattr(tensor, "_local_tensor", tensor)


def some_of(tensor: Any, many: int) -> Any:
    """Return about `many` values of a tensor, evenly distributed over its rows and columns."""
    every = max(1, tensor.numel() // many)
    while gcd(every, prod(tensor.shape[1:])) > 1:  # otherwise only a few columns would be sampled
        every += 1
    return tensor.reshape(-1)[::every]


def _ddp_options(module: Any) -> dict[str, Any]:
    names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
    options = {name: getattr(module, name, None) for name in names}
    options["broadcast_buffers"] = getattr(module, "broadcast_buffers", None)
    return options


def _is_channels_last(tensor: Any) -> bool:
    import torch

    return bool(tensor.is_contiguous(memory_format=torch.channels_last))
