"""Wrappers around functions of torch, Python and other packages, for rooms that look or change.

Torch is not imported for that.

wrapping.py has the order in which observe/, cures/ and trials wrap the same function.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
