"""What of a tensor reaches a file: its values, as bytes."""

from __future__ import annotations

from typing import Any

import torch

# The names of the safetensors format. What is not here can only be stored as bytes.
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
    """Why `value` cannot be stored as a tensor of plain values; None if it can."""
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
    """The values in row-major order as a flat uint8 tensor; a view where that is possible."""
    if not tensor.numel():  # one of numpy's has strides of 0, by which torch views no bytes
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def view_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors exactly when they are the same values in the same memory."""
    if tensor.numel() == 0:
        return (id(tensor),)
    place = (str(tensor.device), tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())
