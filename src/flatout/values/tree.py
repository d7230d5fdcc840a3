"""Nested state without pickle: tensors by name, and everything else as a JSON tree.

JSON's own types represent themselves: None, bool, int, str, finite float, list, and dict with
string keys. Any other value is an object with the key "!", which names its type.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.values.tensors import DTYPES, flat_bytes, refusal, view_key

Json = Any

# _TAG: key that names the type of a value. _DEEPEST: maximum number of nested levels.
# _JSON_INTEGERS: smallest absolute value of an int that is stored as hexadecimal text.
_TAG = "!"
_DEEPEST = 100
_JSON_INTEGERS = 2**63
_NO_VALUES = "OV"  # dtype.kind of numpy's objects (O) and records (V)


def flatten(state: Any, path: str = "state") -> tuple[dict[str, Tensor], Json]:
    """Convert `state` to tensors and a tree that JSON can hold.

    Python values may be None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict and
    Counter, but no subclass of these types. Dict keys may have any of these types. Tensors,
    torch.Size, torch.dtype, torch.device, and numpy arrays and scalars (except objects and records)
    are also allowed.

    A tensor that occurs twice is stored once, and restored as one tensor. Tensors are not copied:
    the caller must copy them before the next step writes to them. `requires_grad` and the device
    are not stored.

    Args:
        state: the values.
        path: name of the state in errors; the tensors' names start with this name.

    Raises:
        CheckpointError: a value cannot be stored. The error names the value's path in the state
            and its type.
    """
    flattening = _Flattening()
    tree = flattening.encode(state, path, 0)
    return flattening.tensors, tree


def unflatten(tensors: Mapping[str, Tensor], tree: Json) -> Any:
    """Restore the state from the output of `flatten`, on the devices of `tensors`.

    Raises:
        CheckpointError: `flatten` cannot have made the tree.
    """
    try:
        return _Unflattening(tensors).decode(tree)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, struct.error) as error:
        raise CheckpointError(
            f"the state is not readable: {type(error).__name__}: {error}",
            do="use the version of Flatout that wrote it, or a newer one",
        ) from error


class _Flattening:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._stored: dict[tuple[object, ...], Json] = {}

    def encode(self, value: Any, path: str, depth: int) -> Json:
        if depth > _DEEPEST:
            raise CheckpointError(
                f"cannot store the state: it is deeper than {_DEEPEST} levels, or contains itself",
                where=f"{path[:200]}…",
            )
        kind = type(value)
        if kind in (list, tuple):
            items = [self.encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
            return items if kind is list else {_TAG: "tuple", "items": items}
        if kind in _DICTS:
            return self._dict(value, path, depth)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic) or kind is np.ndarray:
            return self._numpy(value, path)
        if kind in _LEAVES:
            return _LEAVES[kind](value)
        raise CheckpointError(
            f"cannot store a {kind.__module__}.{kind.__qualname__}: only plain data and tensors",
            where=path,
            do="turn it into numbers, strings, lists, dicts or tensors",
        )

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Json:
        pairs = []
        for key, item in value.items():
            place = f"{path}[{_shown(key)}]"
            if isinstance(key, Tensor):
                raise CheckpointError("cannot store a tensor as a key of a dict", where=path)
            encoded = self.encode(key, f"the key {place}", depth + 1)
            pairs.append([encoded, self.encode(item, place, depth + 1)])
        if type(value) is dict and all(isinstance(k, str) and k != _TAG for k, _ in pairs):
            return dict(pairs)
        return {_TAG: _DICTS[type(value)], "items": pairs}

    def _tensor(self, value: Tensor, path: str) -> Json:
        reason = refusal(value)
        if reason:
            raise CheckpointError(f"cannot store a tensor: {reason}", where=path)
        key = view_key(value)
        if key not in self._stored:
            plain = value.detach()
            leaf: dict[str, Json] = {_TAG: "tensor"}
            if plain.dtype in DTYPES:
                strides = _strides(plain)
                leaf["name"] = self._add(plain, path)
                if strides:
                    leaf["strides"] = strides
            else:
                leaf["name"] = self._add(flat_bytes(plain), path)
                leaf |= {"dtype": _LEAVES[torch.dtype](plain.dtype), "shape": list(plain.shape)}
            self._stored[key] = leaf
        return self._stored[key]

    def _numpy(self, value: Any, path: str) -> Json:
        array = np.asarray(value)
        if array.dtype.kind in _NO_VALUES:
            raise CheckpointError(f"cannot store a numpy array of {array.dtype}", where=path)
        leaf = {"dtype": array.dtype.str, "shape": list(array.shape)}
        if isinstance(value, np.generic):
            return {_TAG: "scalar", **leaf, "base64": base64.b64encode(array.tobytes()).decode()}
        content = torch.frombuffer(bytearray(array.tobytes()) or bytearray(1), dtype=torch.uint8)
        return {_TAG: "array", **leaf, "name": self._add(content[: array.nbytes], path)}

    def _add(self, tensor: Tensor, path: str) -> str:
        name = path if path.isascii() and path.isprintable() else ascii(path)
        if name in self.tensors:
            name = f"{name} #{len(self.tensors)}"
        self.tensors[name] = tensor
        return name


class _Unflattening:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[str, Tensor] = {}

    def decode(self, tree: Json) -> Any:
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if _TAG not in tree:
            return {key: self.decode(item) for key, item in tree.items()}
        kind = tree[_TAG]
        if kind == "tuple":
            return tuple(self.decode(item) for item in tree["items"])
        if kind in _FROM_DICTS:
            pairs = [(self.decode(key), self.decode(item)) for key, item in tree["items"]]
            return _FROM_DICTS[kind](dict(pairs))
        if kind == "tensor":
            return self._tensor(tree)
        if kind == "array":
            return _array(tree, self._tensors[tree["name"]].numpy().tobytes()).copy()
        return _FROM_LEAVES[kind](tree)

    def _tensor(self, leaf: dict[str, Any]) -> Tensor:
        name = leaf["name"]
        if name not in self._made:
            tensor = self._tensors[name]
            if "dtype" in leaf:
                dtype = _FROM_LEAVES["dtype"](leaf["dtype"])
                tensor = tensor.view(dtype).reshape(leaf["shape"])
            if "strides" in leaf:
                strided = torch.empty_strided(tensor.shape, leaf["strides"], dtype=tensor.dtype)
                tensor = strided.copy_(tensor)
            self._made[name] = tensor
        return self._made[name]


def _strides(tensor: Tensor) -> list[int] | None:
    if tensor.is_contiguous():
        return None
    kept = torch.empty_like(tensor, device="meta")
    return None if kept.is_contiguous() else list(kept.stride())


def _shown(key: Any) -> str:
    try:
        return repr(key)
    except ValueError:  # Python refuses to write ints of more than 4300 decimal digits
        return f"<{type(key).__name__}>"


def _integer(value: int) -> Json:
    # Other JSON readers support at most 64 bits, and Python refuses very long decimal ints.
    return value if abs(value) < _JSON_INTEGERS else {_TAG: "int", "hex": hex(value)}


def _float(value: float) -> Json:
    # Hex preserves the sign and payload bits of a NaN.
    return value if math.isfinite(value) else {_TAG: "float", "hex": struct.pack(">d", value).hex()}


def _string(value: str) -> Json:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, as in undecodable file names
        return {_TAG: "str", "hex": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _dtype(leaf: dict[str, Any]) -> torch.dtype:
    dtype = getattr(torch, leaf["name"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{leaf['name']!r} is not a dtype")
    return dtype


def _array(leaf: dict[str, Any], content: bytes) -> np.ndarray[Any, Any]:
    dtype = np.dtype(leaf["dtype"])
    if dtype.kind in _NO_VALUES:  # numpy would use the file's bytes as memory addresses
        raise ValueError(f"an array of {dtype}")
    return np.ndarray(leaf["shape"], dtype, content)


# Type names in the tree, for each dict type; and the functions that restore the dicts.
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_FROM_DICTS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    name: kind for kind, name in _DICTS.items()
}

# Functions that convert a value to JSON, by type; and the functions that restore the value.
_LEAVES: dict[type, Callable[[Any], Json]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _integer,
    float: _float,
    str: _string,
    bytes: lambda value: {_TAG: "bytes", "base64": base64.b64encode(value).decode()},
    torch.Size: lambda value: {_TAG: "size", "sizes": list(value)},
    torch.dtype: lambda value: {_TAG: "dtype", "name": str(value).removeprefix("torch.")},
    torch.device: lambda value: {_TAG: "device", "name": str(value)},
}

_FROM_LEAVES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda leaf: int(leaf["hex"], 16),
    "float": lambda leaf: struct.unpack(">d", bytes.fromhex(leaf["hex"]))[0],
    "str": lambda leaf: bytes.fromhex(leaf["hex"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda leaf: base64.b64decode(leaf["base64"]),
    "size": lambda leaf: torch.Size(leaf["sizes"]),
    "dtype": _dtype,
    "device": lambda leaf: torch.device(leaf["name"]),
    "scalar": lambda leaf: _array(leaf, base64.b64decode(leaf["base64"]))[()],
}
