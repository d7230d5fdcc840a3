"""Reads the figures of a run for `flatout explain`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from flatout.errors import FlatoutError
from flatout.train import Explanation

_DO = "name the run folder of a fit that has ended, or a file of History.save"


def read_run(run: str | os.PathLike[str]) -> Explanation:
    """What explains a run.

    Args:
        run: its folder, or a file that `History.save` wrote.

    Raises:
        FlatoutError: the file is missing, or is no whole file of a fit's figures.
    """
    path = Path(run)
    file = path / "history.json" if os.path.isdir(path) else path
    try:
        history = json.loads(file.read_text())
        if not {"steps", "lanes_ms", "recipe"} <= history.keys():
            raise ValueError("it has no steps, lanes_ms and recipe")
        result = Explanation.of(history)
        result.lines()  # what is missing or of another kind shows here
    except OSError as error:
        raise FlatoutError(
            f"cannot read a run's figures: {error.strerror}", where=str(file), do=_DO
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FlatoutError(
            f"expected the figures of a fit, found something else ({error!r})",
            where=str(file),
            do=_DO,
        ) from error
    return result
