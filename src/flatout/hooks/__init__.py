"""Wrappers around functions of torch, Python and other packages, for rooms that look or change.

Torch is not imported for that.
"""

from flatout.hooks.compiling import is_anything_compiled, skip_our_frames
from flatout.hooks.wrapping import ORDER, Hook, wrap
from flatout.importing import when_imported

__all__ = ["ORDER", "Hook", "is_anything_compiled", "skip_our_frames", "when_imported", "wrap"]
