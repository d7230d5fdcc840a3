"""C extensions and their interfaces.

`relu_pool` and `batch_norm` are imported on their own, because they need torch.

The folder of an extension has NAME.c, which is the module `flatout.kernels._NAME`, and the
interface to it in __init__.py. core.h does the work without Python, so that tests/fuzz can include
it. shared/ has headers for all. If an extension is not built, torch or numpy do the work of some
kernels, and the others raise `MissingExtension` (missing_extension.py). A parser reports a status
and an offset for each bad row and raises nothing: files and lines are known to data/.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
