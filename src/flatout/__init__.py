"""Flatout trains models as fast as the hardware allows.

Names load lazily, because threads, the allocator and device settings must land before torch loads.
"""

from __future__ import annotations

from flatout import keras_import
from flatout.lazy import attach

__version__ = "0.1.0"

keras_import.explain()

__getattr__, __dir__, __all__ = attach(__name__, __file__)
