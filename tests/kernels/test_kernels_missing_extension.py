"""An install without the C extensions: what works, and the one error of what does not."""

import subprocess
import sys

import pytest

_WITHOUT = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("flatout.kernels._"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
import flatout
"""

_TRAINS = """
import torch
train, test = flatout.data.digits(size=8)
model = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(),
    torch.nn.Dropout(0.1), torch.nn.Linear(32, 10),
)
trainer = flatout.Trainer(model, lr=0.01, metrics=["accuracy"])
trainer.fit(train, batch_size=32, epochs=3)
print(trainer.evaluate(test)["accuracy"] > 0.8)
"""

_EACH = """
import numpy as np
from flatout.errors import FlatoutError
from flatout.kernels import MissingExtension
path = sys.argv[1]
calls = {
    "libsvm": lambda: flatout.data.libsvm(path),
    "criteo": lambda: flatout.data.criteo(path),
    "tfrecord": lambda: flatout.data.tfrecord(path),
    "csv": lambda: next(flatout.data.csv(path).source(batch_size=1, shuffle=False).batches(0)),
    "doctor": lambda: __import__("flatout.observe.lanes"),
}
for name, call in calls.items():
    try:
        call()
    except MissingExtension as error:
        assert isinstance(error, FlatoutError)
        print(name, error)
    except Exception as error:
        print(name, "OTHER", type(error), error)
"""


def _run(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", _WITHOUT + code, *arguments],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_a_model_trains_and_one_warning_says_why_it_is_slow():
    done = _run(_TRAINS)
    assert done.stdout.split()[-1] == "True"
    assert done.stderr.count("RuntimeWarning: Flatout's C extensions are missing") == 1


@pytest.mark.slow
def test_what_needs_an_extension_says_which_and_what_to_install(tmp_path):
    (tmp_path / "rows").write_bytes(b"1 1:2 3:4\n0 2:5\n")
    said = _run(_EACH, str(tmp_path / "rows")).stdout
    needed = {
        "libsvm": "_lines",
        "criteo": "_lines",
        "tfrecord": "_example",
        "csv": "_lines",
        "doctor": "_clock",
    }
    for name, extension in needed.items():
        assert f"{name} Flatout's C extension {extension} is not built" in said
    assert said.count("do: install a C compiler, then `pip install --force-reinstall") == 5
