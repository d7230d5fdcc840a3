"""The precision of fp32 products, by torch's setting for all backends and by those of each."""

import os

import pytest

import forked

LOOK = """
import torch
from flatout.devices import keep_matmul_precision, matmul_precision

def look():
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision

{script}
before = look()
put_back = keep_matmul_precision()
print(matmul_precision())
torch.set_float32_matmul_precision("medium")
put_back()
assert look() == before, (look(), before)
"""


@pytest.mark.parametrize(
    ("script", "precision"),
    [
        ("", "highest"),
        ("torch.set_float32_matmul_precision('high')", "high"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "high"),
    ],
)
def test_it_is_told_and_put_back(script, precision, tmp_path):
    code = LOOK.format(script=script)  # in its own process: these settings are the process'
    done = forked.run(["-c", code], tmp_path, os.environ, forked.TORCH)
    assert done.stdout.strip() == precision, done.stderr
