"""C extensions and their interfaces.

torch or numpy do the work of some kernels where their extensions are not built. The others raise
`MissingExtension` then. `relu_pool` and `batch_norm` are imported on their own: they need torch.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
