"""Digests of data and functions, so that results are never used for other data or functions."""

from __future__ import annotations

import functools
import hashlib
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

# Types of global values that count in a digest. A module does not count.
_PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
# Bytes of a tensor that are read: all of a smaller tensor, a sample of a larger one.
_READ = 64 * 2**20
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


# False within `without_plain_values`: digests ignore numbers and texts in global names.
PLAIN_COUNTS: ContextVar[bool] = ContextVar("plain values count", default=True)


@contextmanager
def without_plain_values() -> Iterator[None]:
    """Leave numbers and texts that code reads, such as a rank or a path, out of digests."""
    token = PLAIN_COUNTS.set(False)
    try:
        yield
    finally:
        PLAIN_COUNTS.reset(token)


class NoDigest(Exception):
    """An object's content cannot be put into a digest."""


def digest_of(*parts: str) -> str:
    """Return the first 16 hex digits of a SHA-256 over texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def function_digest(function: Any) -> str:
    """Return 16 hex digits over a function's code and values, or over its code alone.

    The code alone is used if a value has no digest.
    """
    try:
        return function_name(function)
    except NoDigest:
        return digest_of(_kind(function), code_words(getattr(function, "__code__", None)))


def function_name(function: Any) -> str:
    """Return 16 hex digits over a function's code and the values that it uses.

    These count: code, constants, defaults, values of the closure, the object of a method, and
    functions and plain values that the function reads from global names.

    Raises:
        NoDigest: a value has no digest.
    """
    return digest_of(*_words(function, set()))


def tensors_name(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()[:16]


def content_digest(tensor: torch.Tensor) -> str:
    """Return 16 hex digits over dtype, shape and bytes of a tensor.

    Of a tensor above 64 MiB, only rows spread evenly over it are read, 64 MiB in all.
    """
    tensor = tensor.detach()
    words = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided:
        return digest_of(words, str(tensor.layout), *map(content_digest, _stored(tensor)))
    whole = tensor.numel() * tensor.element_size()
    if whole > _READ:
        count = max(1, len(tensor) * _READ // whole)
        chosen = torch.linspace(0, len(tensor) - 1, count, dtype=torch.float64).long()
        # torch cannot gather rows of the wider unsigned dtypes.
        signed = tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))
        tensor = signed.index_select(0, chosen.to(tensor.device))
    digest = hashlib.blake2b(words.encode(), digest_size=8)
    flat = tensor.cpu().contiguous().reshape(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _stored(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        yield from (whole.indices(), whole.values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def _words(value: Any, seen: set[int]) -> Iterator[str]:
    if id(value) in seen:
        yield "again"
        return
    yield _kind(value)
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        yield content_digest(value)
    elif isinstance(value, torch.Tensor):
        yield tensors_name({"": value.detach().cpu()})
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        yield f"{value.dtype} {value.shape} {hashlib.blake2b(value.tobytes()).hexdigest()}"
    elif isinstance(value, (tuple, list)):
        yield str(len(value))
        for part in value:
            yield from _words(part, seen)
    elif isinstance(value, (set, frozenset)):  # the order of a set may differ in another process
        yield from sorted("\0".join(_words(part, seen)) for part in value)
    elif isinstance(value, dict):
        yield str(len(value))
        for key, part in value.items():
            yield from _words(key, seen)
            yield from _words(part, seen)
    elif callable(value):
        yield from _callable_words(value, seen | {id(value)})
    else:
        yield _pickled(value)


def _callable_words(function: Callable[..., Any], seen: set[int]) -> Iterator[str]:
    if isinstance(function, functools.partial):
        yield from _words((function.func, function.args, function.keywords), seen)
    elif inspect.ismethod(function):
        yield from _words(function.__func__, seen)
        yield from _words(function.__self__, seen)
    elif inspect.isfunction(function):
        yield code_words(function.__code__)
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        yield from _words((function.__defaults__, function.__kwdefaults__, cells), seen)
        yield from _global_words(function, seen)
    elif inspect.isbuiltin(function) or inspect.isclass(function):
        yield f"{function.__module__}.{function.__qualname__}"
    elif type(function).__module__ in ("builtins", "numpy", "torch"):
        yield str(getattr(function, "__name__", repr(function)))
    else:  # an object with `__call__`
        yield code_words(getattr(type(function).__call__, "__code__", None))
        yield from _words(getattr(function, "__dict__", None) or {}, seen)
        yield _pickled(function)


def _global_words(function: Any, seen: set[int]) -> Iterator[str]:
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if inspect.isfunction(value) or (PLAIN_COUNTS.get() and isinstance(value, _PLAIN)):
            yield name
            yield from _words(value, seen)


def _pickled(value: Any) -> str:
    try:
        return hashlib.blake2b(pickle.dumps(value, protocol=4)).hexdigest()
    except Exception as error:  # an object's own pickling may raise any error
        raise NoDigest(f"{_kind(value)}: {error}") from error


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def code_words(code: Any) -> str:
    if code is None:
        return ""
    inner = [_constant_words(constant) for constant in code.co_consts]
    return " ".join([code.co_code.hex(), repr(code.co_names), *inner])


def _constant_words(value: Any) -> str:
    if hasattr(value, "co_code"):
        return code_words(value)
    if isinstance(value, frozenset):  # the order of a set may differ in another process
        return f"{{{', '.join(sorted(map(_constant_words, value)))}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant_words, value))})"
    return repr(value)
