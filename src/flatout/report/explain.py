"""Reads the figures of a run for `flatout explain`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from flatout.errors import FlatoutError
from flatout.train import Explanation


def read_run(run: str | os.PathLike[str]) -> Explanation:
    """Return the explanation of a run.

    Args:
        run: a run folder, or a file that `History.save` wrote.

    Raises:
        FlatoutError: the file is missing, or is no complete file of a fit's figures.
    """
    path = Path(run)
    file = path / "history.json" if os.path.isdir(path) else path
    try:
        history = json.loads(file.read_text())
        if not {"steps", "lanes_ms", "recipe"} <= history.keys():
            raise ValueError("it has no steps, lanes_ms and recipe")
        result = Explanation.of(history)
        result.lines()  # raises if figures are missing or of another type
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise no_figures(file, error) from error
    return result


def no_figures(file: Path, error: Exception) -> FlatoutError:
    what = f"expected the figures of a fit, found something else ({error!r})"
    if isinstance(error, OSError):
        what = f"cannot read a run's figures: {error.strerror}"
    do = "name the run folder of a fit that has ended, or a file of History.save"
    return FlatoutError(what, where=str(file), do=do)
