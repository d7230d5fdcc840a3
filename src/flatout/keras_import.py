"""Explains an `import keras` that cannot work, in a process that has imported Flatout.

Keras chooses its backend when it is imported; the default is TensorFlow. If that is not installed,
the import ends deep inside of Keras with a missing module. This module checks the choice first, and
prints the setting to use. It changes nothing. An import that can work is not affected, nor is a
check whether Keras is installed.
"""

from __future__ import annotations

import os

from flatout.errors import FlatoutError
from flatout.importing import before_import

# The modules that each backend imports.
_NEEDS = {
    "tensorflow": ("tensorflow",),
    "jax": ("jax",),
    "torch": ("torch",),
    "numpy": ("numpy", "jax"),
    "openvino": ("openvino",),
}


class KerasBackendError(FlatoutError, ImportError):
    """Keras would use a backend that does not exist, or is not installed."""


def explain() -> None:
    """Check Keras' backend whenever Keras is imported from now on."""
    before_import("keras", _look)


def _look() -> None:
    error = problem()
    if error is not None:
        raise error


def problem() -> KerasBackendError | None:
    """Return the reason why an `import keras` could not work here, or None."""
    from importlib.util import find_spec

    backend, source = _chosen()
    do = (
        "for Flatout set KERAS_BACKEND=torch before Keras is imported: in the shell, by "
        "os.environ['KERAS_BACKEND'] = 'torch' at the top of the script, or by starting it with "
        "`flatout run`"
    )
    if backend not in _NEEDS:
        return KerasBackendError(
            f"Keras has no backend {backend!r}; it has {', '.join(_NEEDS)}", where=source, do=do
        )
    missing = [module for module in _NEEDS[backend] if find_spec(module) is None]
    if not missing:
        return None
    return KerasBackendError(
        f"Keras would take its {backend} backend, and {missing[0]} is not installed",
        where=source,
        do=do,
    )


def _chosen() -> tuple[str, str]:
    import json
    from pathlib import Path

    asked = os.environ.get("KERAS_BACKEND")
    if asked:
        return asked, f"KERAS_BACKEND={asked}"
    home = os.environ.get("KERAS_HOME")
    file = (Path(home) if home else Path.home() / ".keras") / "keras.json"
    try:
        backend = json.loads(file.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        backend = None
    if backend:
        return str(backend), str(file)
    return "tensorflow", "KERAS_BACKEND is not set, so Keras takes its default"
