"""What `import keras` says in a process that has imported Flatout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("keras")


def importing(tmp_path, program="import flatout, keras; print(keras.backend.backend())", **env):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KERAS_")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, "KERAS_HOME": str(tmp_path), **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(find_spec("tensorflow") is not None, reason="TensorFlow is installed")
def test_a_missing_choice_is_explained(tmp_path):
    said = importing(tmp_path).stderr
    assert "Keras would take its tensorflow backend, and tensorflow is not installed" in said
    assert "KERAS_BACKEND is not set" in said
    assert "do: for Flatout set KERAS_BACKEND=torch" in said


def test_a_wrong_choice_is_explained(tmp_path):
    said = importing(tmp_path, KERAS_BACKEND="troch").stderr
    assert "Keras has no backend 'troch'; it has tensorflow, jax, torch" in said
    assert "KERAS_BACKEND=troch" in said


def test_a_choice_in_keras_own_file_is_named(tmp_path):
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "openvino"}))
    said = importing(tmp_path).stderr
    assert "its openvino backend, and openvino is not installed" in said
    assert str(tmp_path / "keras.json") in said


@pytest.mark.slow
def test_a_choice_that_works_goes_its_way(tmp_path):
    assert importing(tmp_path, KERAS_BACKEND="torch").stdout == "torch\n"
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "torch"}))
    assert importing(tmp_path).stdout == "torch\n"


def test_it_is_an_import_error_for_those_who_do_without_keras(tmp_path):
    program = (
        "import flatout\ntry:\n    import keras\nexcept ImportError:\n    print('without Keras')\n"
    )
    assert importing(tmp_path, program, KERAS_BACKEND="troch").stdout == "without Keras\n"


def test_looking_at_the_choice_costs_no_import(tmp_path):
    program = "import sys, flatout; print({'torch', 'keras', 'numpy'} & set(sys.modules))"
    assert importing(tmp_path, program).stdout == "set()\n"


def test_a_look_whether_keras_is_there_is_no_import(tmp_path):
    program = (
        "import flatout\n"
        "from importlib.util import find_spec\n"
        "print(find_spec('keras').origin.endswith('__init__.py'))\n"
    )
    assert importing(tmp_path, program, KERAS_BACKEND="troch").stdout == "True\n"


@pytest.mark.slow
def test_afterwards_keras_is_as_if_never_looked_at(tmp_path):
    program = (
        "import flatout, keras, pickle\n"
        "print(type(keras.__loader__).__module__, keras.__spec__.loader is keras.__loader__)\n"
    )
    said = importing(tmp_path, program, KERAS_BACKEND="torch").stdout
    assert "flatout" not in said
    assert said.endswith("True\n")
