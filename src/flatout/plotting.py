"""Import of matplotlib, with a remedy if it is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.errors import FlatoutError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_class() -> type[Figure]:
    """Return matplotlib's Figure, which needs no pyplot and no display.

    Raises:
        FlatoutError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlatoutError("plotting needs matplotlib", do="pip install 'flatout[plot]'") from error
    return Figure
