"""C extensions, and their numpy fallbacks that give the same bytes.

`relu_pool` is imported on its own: it needs torch.
"""

from __future__ import annotations

from flatout.kernels.gather import available, gather_rows

__all__ = ["available", "gather_rows"]
