"""The precision of fp32 matrix products, which torch sets by one old and several newer settings.

After a script has set one of the newer ones, such as `torch.backends.cuda.matmul.fp32_precision =
"tf32"`, torch's own `get_float32_matmul_precision` raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def matmul_precision() -> str:
    """Return "highest", "high" or "medium", from the setting that a script has used."""
    import torch

    try:
        precision: str = torch.get_float32_matmul_precision()
        return precision
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def keep_matmul_precision() -> Callable[[], None]:
    """Return a function that restores the present precision, of all backends and of each."""
    import torch

    of_all = matmul_precision()
    of_each = [(own, own.fp32_precision) for own in _by_backend(torch)]

    def put_back() -> None:
        torch.set_float32_matmul_precision(of_all)
        for own, precision in of_each:
            own.fp32_precision = precision

    return put_back


def _by_backend(torch: Any) -> list[Any]:
    own = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    return [item for item in own if hasattr(item, "fp32_precision")]
