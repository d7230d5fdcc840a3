"""Counts docstrings and comments that are hard to read: `words.py [--list] [PATH ...]`.

It fails where a kind has more findings than its limit. A change may lower a limit.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LIMITS = {"first word": 6, "phrase": 11, "long sentence": 7}
_FIRST = re.compile(r"(What|Of|As|How|Where|Those|That|Which|So)\b")
_PHRASE = re.compile(
    r"\b(so many|so long|so often|looked at|(is|are|was|were) (told|said|seen)|beside|behind)\b",
    re.IGNORECASE,
)
_MOST_WORDS = 30


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text, not isinstance(node, ast.Module)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# "), False


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    for line, text, is_docstring in texts(path):
        if is_docstring and _FIRST.match(text):
            yield line, "first word", text.splitlines()[0]
        for match in _PHRASE.finditer(text):
            yield line, "phrase", match.group()
        for sentence in re.split(r"(?<=[.:;?!])\s|\n\s*\n", text):
            if len(sentence.split()) > _MOST_WORDS:
                yield line, "long sentence", " ".join(sentence.split()[:8])


def main() -> int:
    paths = [Path(name) for name in sys.argv[1:] if name != "--list"]
    counts = dict.fromkeys(LIMITS, 0)
    for path in paths or sorted(Path("src").rglob("*.py")):
        for line, kind, words in findings(path):
            counts[kind] += 1
            if "--list" in sys.argv:
                print(f"{path}:{line}: {kind}: {words}")
    print(counts)
    return int(any(counts[kind] > most for kind, most in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
