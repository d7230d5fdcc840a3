"""Rich's Console, which shows names from files and other processes as plain text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console
from rich.segment import Segment

from flatout.console import printable


class Console(console.Console):
    """A rich Console that shows control characters in text instead of sending them."""

    def render(
        self, renderable: Any, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render like rich, with text that is safe for a terminal."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(self._encodable(printable(text)), style)

    def _encodable(self, text: str) -> str:
        if text.isascii():
            return text
        return text.encode(self.encoding, "replace").decode(self.encoding)
