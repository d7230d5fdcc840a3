"""What the source of a script says before it runs."""

from __future__ import annotations

import ast
import os
from pathlib import Path


def read(script: Path) -> tuple[str, set[str]]:
    """Returns a script's source and the top-level names of what it imports; else nothing."""
    try:
        source = script.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):
        return "", set()  # Python will say what is wrong with it
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


def keras_backend(script: Path) -> dict[str, str]:
    """Returns KERAS_BACKEND=torch for a script of Keras and torch that does not choose itself.

    Unasked, Keras takes TensorFlow, and fails to import where that is not installed.
    """
    source, imported = read(script)
    if "KERAS_BACKEND" in os.environ or "KERAS_BACKEND" in source:
        return {}
    asks = "keras" in imported and imported & {"torch", "flatout"}
    return {"KERAS_BACKEND": "torch"} if asks else {}
