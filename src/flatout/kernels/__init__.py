"""The C extension and its numpy twins, which give the same bytes."""

from __future__ import annotations

from flatout.kernels.gather import available, gather_rows

__all__ = ["available", "gather_rows"]
