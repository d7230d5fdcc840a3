"""IDX files to read."""

import gzip
import struct
from pathlib import Path

import numpy as np

_CODES = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}


def write(path, array):
    """Write an IDX file, packed by gzip where the name ends in `.gz`."""
    values = np.asarray(array)
    header = struct.pack(
        f">HBB{values.ndim}I", 0, _CODES[values.dtype.name], values.ndim, *values.shape
    )
    content = header + values.astype(values.dtype.newbyteorder(">")).tobytes()
    if Path(path).suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    Path(path).write_bytes(content)
