"""C extensions, and their numpy fallbacks that give the same bytes.

`relu_pool` is imported on its own: it needs torch.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
