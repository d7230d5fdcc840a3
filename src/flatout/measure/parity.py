"""Whether two results are the same, and if not, how far apart they are.

How differences are measured, element by element:

- `bitwise` compares bytes: a NaN equals a NaN of the same bits, 0.0 and -0.0 differ.
- `max_abs` is the largest |a - b|. Two NaNs, or two equal infinities, differ by 0; where only one
  side is NaN or infinite, the difference is infinite.
- `max_rel` is the largest |a - b| / max(|a|, |b|, f * s), where s is the largest finite magnitude
  in the tensor, both sides together, and f is `scale_floor` (1e-3). Rounding errors are in
  proportion to a tensor's scale, so an element that is nearly 0 by cancellation is judged by the
  scale and not by what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.errors import DataError, ModelError

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor | npt.NDArray[Any]

_SCALE_FLOOR = 1e-3
# Elements that are widened to float64 at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Difference:
    """How two sets of tensors differ; the module's docstring defines the measures.

    Args:
        bitwise: whether every byte is the same.
        max_abs: the largest absolute difference.
        max_rel: the largest relative difference.
        worst: the name of the tensor with the largest relative difference, None if `bitwise`.
    """

    bitwise: bool
    max_abs: float
    max_rel: float
    worst: str | None

    @property
    def words(self) -> str:
        """One phrase: `bit-identical`, or the largest differences and where."""
        if self.bitwise:
            return "bit-identical"
        return f"differs by up to {self.max_rel:.1e} ({self.worst}), {self.max_abs:.1e} absolute"


@dataclass(frozen=True)
class CurveDifference:
    """How two curves differ.

    Args:
        max_rel: the largest relative difference.
        step: the index at which it is, None where the curves are equal.
        first: the first index at which they differ, None where they are equal.
    """

    max_rel: float
    step: int | None
    first: int | None

    @property
    def words(self) -> str:
        """One phrase: `equal`, or the largest difference and where."""
        if self.step is None:
            return "equal"
        return f"differs by up to {self.max_rel:.1e} at step {self.step}, first at {self.first}"


def compare_tensors(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, scale_floor: float = _SCALE_FLOOR
) -> Difference:
    """Compares tensors by name, such as two state dicts, on whatever devices they are.

    Args:
        a: name to torch tensor (any dtype, bf16 included) or numpy array (bool, integer, float or
            complex). A torch tensor may stand against a numpy array of the same dtype.
        b: the same names, shapes and dtypes.
        scale_floor: f in the definition of `max_rel`.

    Raises:
        ModelError: if names, shapes or dtypes differ, naming them, or a value is no tensor.
    """
    _check_names(a, b)
    bitwise, worst = True, None
    max_abs = max_rel = 0.0
    for name in a:
        one, other = _flat(name, a[name], b[name])
        if all(np.array_equal(_bytes(x), _bytes(y)) for x, y in _chunks(one, other)):
            continue
        absolute, relative = _distance(one, other, scale_floor)
        if bitwise or relative > max_rel:
            worst = name
        bitwise = False
        max_abs, max_rel = max(max_abs, absolute), max(max_rel, relative)
    return Difference(bitwise, max_abs, max_rel, worst)


def compare_curves(
    a: Sequence[float] | npt.NDArray[Any],
    b: Sequence[float] | npt.NDArray[Any],
    *,
    scale_floor: float = _SCALE_FLOOR,
) -> CurveDifference:
    """Compares two curves, such as losses by step, as float64 of shape (steps,).

    The relative difference is defined as for tensors, with the curve's largest magnitude as scale.

    Raises:
        DataError: if the curves are empty or of different lengths.
    """
    one, other = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if one.ndim != 1 or one.shape != other.shape or not one.size:
        raise DataError(
            f"expected two curves over the same steps, found shapes {one.shape} and {other.shape}"
        )
    absolute = _absolute(one, other)
    relative = _relative(one, other, absolute, scale_floor * max(_scale(one), _scale(other)))
    if not absolute.any():
        return CurveDifference(0.0, None, None)
    step = int(relative.argmax())
    return CurveDifference(float(relative[step]), step, int(absolute.nonzero()[0][0]))


def _check_names(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    only_a = [name for name in a if name not in b]
    only_b = [name for name in b if name not in a]
    if only_a or only_b:
        raise ModelError(
            "the names differ: "
            f"only the first has {_some(only_a)}, only the second has {_some(only_b)}"
        )


def _some(names: list[str]) -> str:
    words = ", ".join(names[:5]) or "none"
    return f"{words} and {len(names) - 5} more" if len(names) > 5 else words


def _flat(name: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Returns both values as contiguous one-dimensional tensors or arrays on the CPU."""
    kinds = [_kind(name, value) for value in (a, b)]
    if kinds[0] != kinds[1]:
        raise ModelError(
            f"expected the same dtype and shape, found {kinds[0]} and {kinds[1]}", where=name
        )
    return _on_cpu(a), _on_cpu(b)


def _kind(name: str, value: Any) -> str:
    """Returns dtype and shape, such as `float32 [64, 3]`."""
    comparable = value.dtype.kind in "biufc" if isinstance(value, np.ndarray) else _is_torch(value)
    if not comparable:
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ModelError(f"expected a tensor or an array of numbers, found {kind}", where=name)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _is_torch(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1)
    import torch

    dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
    return dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)


def _chunks(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    for at in range(0, len(a), _CHUNK):
        yield a[at : at + _CHUNK], b[at : at + _CHUNK]


def _bytes(flat: Any) -> npt.NDArray[np.uint8]:
    if isinstance(flat, np.ndarray):
        return flat.view(np.uint8)
    import torch

    view: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return view


def _wide(flat: Any) -> npt.NDArray[Any]:
    """Returns the values in a type that holds each exactly, and their differences well."""
    if not isinstance(flat, np.ndarray):
        if flat.is_floating_point():
            # numpy has no bf16 and no 8-bit floats.
            flat = flat.double()
        flat = flat.numpy()
    exact = np.longdouble if flat.dtype.kind in "biu" else np.result_type(flat.dtype, np.float64)
    wide: npt.NDArray[Any] = flat.astype(exact)
    return wide


def _distance(a: Any, b: Any, scale_floor: float) -> tuple[float, float]:
    """Returns (max_abs, max_rel) of two flat values."""
    scale = max(max(_scale(_wide(x)), _scale(_wide(y))) for x, y in _chunks(a, b))
    max_abs = max_rel = 0.0
    for x, y in _chunks(a, b):
        one, other = _wide(x), _wide(y)
        absolute = _absolute(one, other)
        relative = _relative(one, other, absolute, scale_floor * scale)
        max_abs = max(max_abs, float(absolute.max()))
        max_rel = max(max_rel, float(relative.max()))
    return max_abs, max_rel


def _scale(values: npt.NDArray[Any]) -> float:
    magnitudes = np.abs(values)
    return float(magnitudes.max(initial=0.0, where=np.isfinite(magnitudes)))


def _absolute(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    with np.errstate(invalid="ignore", over="ignore"):
        distance: npt.NDArray[Any] = np.abs(a - b)
    distance[~np.isfinite(distance)] = np.inf
    distance[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    return distance


def _relative(
    a: npt.NDArray[Any], b: npt.NDArray[Any], absolute: npt.NDArray[Any], floor: float
) -> npt.NDArray[Any]:
    size = np.maximum(np.maximum(np.abs(a), np.abs(b)), floor)
    relative = np.zeros_like(absolute)
    np.divide(absolute, size, out=relative, where=(absolute > 0) & np.isfinite(absolute))
    relative[np.isinf(absolute)] = np.inf
    return relative
