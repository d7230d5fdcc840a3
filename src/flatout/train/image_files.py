"""Conversion of paths of image files, given to predict, to the model's input as in training."""

from __future__ import annotations

import os
from typing import Any

from flatout.data import images
from flatout.errors import DataError
from flatout.train.signature import Signature


def files_as_images(x: Any, signature: Signature | None) -> Any:
    """Return images decoded as in training if `x` is a path or a list of paths; else `x`."""
    listed = [x] if isinstance(x, (str, os.PathLike)) else x
    if not isinstance(listed, (list, tuple)) or not listed:
        return x
    if not all(isinstance(path, (str, os.PathLike)) for path in listed):
        return x
    schema = None if signature is None else signature.images
    if schema is None:
        raise DataError(
            f"found the path {os.fspath(listed[0])!r}, and the model does not know how a file "
            "becomes its input",
            do="a Trainer learns this in a fit on flatout.data.images without functions of your "
            "own, and from the file that was saved after such a fit; else read and prepare "
            "the file as in training, such as flatout.data.images(path, size=..., "
            "labels=False)",
        )
    return images(list(listed), schema=schema)
