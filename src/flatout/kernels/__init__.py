"""C extensions and their interfaces.

`relu_pool` and `batch_norm` are imported on their own, because they need torch.

_NAME.c is a Python extension, _NAME_core.h a parser without Python, which tests/fuzz includes too,
NAME.py the interface. All extensions share _module.h and _buffers.h. If an extension is not built,
torch or numpy do the work of some kernels, and the others raise `MissingExtension`
(missing_extension.py). A parser reports a status and an offset for each bad row and raises nothing:
files and lines are known to data/.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
