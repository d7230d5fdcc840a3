"""Facts about a script from its source, before it runs."""

from __future__ import annotations

import ast
import os
from pathlib import Path


def file_of(script: str, *, is_module: bool) -> Path | None:
    """Return the Python file that is run, or None for a module outside of the current folder.

    Args:
        script: a file, a folder with a `__main__.py`, or a module's name.
        is_module: whether `script` is a module's name.
    """
    if not is_module:
        path = Path(script)
        return path / "__main__.py" if path.is_dir() else path
    module = Path(*script.split("."))
    for path in (module.with_suffix(".py"), module / "__main__.py", module / "__init__.py"):
        if path.is_file():
            return Path(os.path.relpath(path))
    return None


def read(script: Path | None) -> tuple[str, set[str]]:
    """Return a script's source and the top-level names of its imports, or both empty."""
    if script is None:
        return "", set()
    try:
        source = script.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):
        return "", set()  # Python will report the error
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }
    return source, imported


def keras_backend(script: Path | None) -> dict[str, str]:
    """Return KERAS_BACKEND=torch for a script of Keras and torch that does not choose itself.

    By default Keras uses TensorFlow, and fails to import if that is not installed.
    """
    source, imported = read(script)
    if "KERAS_BACKEND" in os.environ or "KERAS_BACKEND" in source:
        return {}
    asks = "keras" in imported and imported & {"torch", "flatout"}
    return {"KERAS_BACKEND": "torch"} if asks else {}
