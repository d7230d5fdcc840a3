"""Rich's Console, on which names from files and other processes are text and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console
from rich.segment import Segment

from flatout.console import printable


class Console(console.Console):
    """Takes what rich's takes; control characters in text are shown, not sent."""

    def render(
        self, renderable: Any, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As rich's, with text that a terminal may get."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(self._encodable(printable(text)), style)

    def _encodable(self, text: str) -> str:
        if text.isascii():
            return text
        return text.encode(self.encoding, "replace").decode(self.encoding)
