"""Where the C extensions are absent: one warning, no matter who misses one first.

`FLATOUT_KERNELS=numpy` in the environment, set before the first import, does without them on
purpose and in silence.
"""

from __future__ import annotations

import os
import warnings

WANTED = os.environ.get("FLATOUT_KERNELS") != "numpy"

_said = not WANTED


def say_once() -> None:
    """Warn that an extension is absent, if no one has yet."""
    global _said
    if _said:
        return
    _said = True
    warnings.warn(
        "flatout's C extension is absent, so numpy and torch do its work, with the same results, "
        "more slowly. To get it: install a C compiler, then `pip install --force-reinstall "
        "--no-deps --no-cache-dir flatout`.",
        RuntimeWarning,
        stacklevel=4,
    )
