"""Tensor values as bytes, to write them to files."""

from __future__ import annotations

from typing import Any

import torch

# The dtype names of the safetensors format. Other dtypes can only be stored as bytes.
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def refusal(value: Any) -> str | None:
    """Return the reason why `value` cannot be stored as a tensor of plain values, or None."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} is not a tensor"
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"a {type(value).__name__} is not a plain tensor"
    if value.layout is not torch.strided:
        return f"its layout is {value.layout}; only dense tensors can be stored"
    if value.is_meta:
        return "it is on the meta device and has no values"
    if value.is_quantized:
        return f"it is quantized ({value.dtype})"
    return None


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in row-major order as a flat uint8 tensor, as a view if possible."""
    # an empty numpy array has strides of 0, which torch cannot view as bytes
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def view_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors exactly if both are the same view of memory."""
    if tensor.numel() == 0:
        return (id(tensor),)
    place = (str(tensor.device), tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())
