from __future__ import annotations

import subprocess
import sys
from typing import get_origin

import pytest

import flatout.data


def test_names_are_all_there():
    for name in flatout.data.__all__:
        found = getattr(flatout.data, name)
        assert get_origin(found) or found.__doc__  # types of arguments have no docstring
        assert name in dir(flatout.data)
    with pytest.raises(AttributeError, match="has no attribute 'tape'"):
        flatout.data.tape  # noqa: B018


def test_importing_the_room_imports_neither_torch_nor_numpy():
    code = (
        "import sys, flatout.data;print(sorted({'torch', 'numpy', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
