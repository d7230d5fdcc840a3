"""Pages that a script makes: printed, or compared with the file that is there."""

from __future__ import annotations

import sys
from pathlib import Path


def print_or_check(page: Path, text: str) -> int:
    """Print the text, or with --check compare it with the page; the exit code."""
    if "--check" not in sys.argv[1:]:
        sys.stdout.write(text)
        return 0
    if page.exists() and page.read_text(encoding="utf-8") == text:
        return 0
    docs = Path(__file__).parent
    name = f"docs/{page.relative_to(docs)}"
    print(f"{name} is out of date: python docs/{Path(sys.argv[0]).name} > {name}", file=sys.stderr)
    return 1
