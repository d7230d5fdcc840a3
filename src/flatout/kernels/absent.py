"""Where the C extensions are absent: one warning, whichever is missed first.

`FLATOUT_KERNELS=numpy` in the environment, set before the first import, does without them on
purpose and in silence.
"""

from __future__ import annotations

import os
import warnings

WANTED = os.environ.get("FLATOUT_KERNELS") != "numpy"

_said = not WANTED


def warn_without(extension: object) -> None:
    """Warn, once in a process, where an extension is None: absent."""
    global _said
    if _said or extension is not None:
        return
    _said = True
    warnings.warn(
        "flatout's C extension is absent, so numpy and torch do its work, with the same results, "
        "more slowly. To get it: install a C compiler, then `pip install --force-reinstall "
        "--no-deps --no-cache-dir flatout`.",
        RuntimeWarning,
        stacklevel=4,
    )
