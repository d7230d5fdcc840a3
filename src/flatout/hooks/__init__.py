"""Wrappers around functions of torch, Python and other packages, for rooms that observe or change.

They do not import torch.

wrapping.py has the order in which observe/, cures/ and trials wrap the same function.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
