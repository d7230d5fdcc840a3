"""Where what can be made again is kept: `FLATOUT_CACHE`, or `flatout` in the user's caches."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder; it need not exist yet."""
    own = os.environ.get("FLATOUT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "flatout"
