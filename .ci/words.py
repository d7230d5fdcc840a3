"""Counts sentences that are hard to read in docstrings and comments.

Usage: `words.py [--list] [PATH ...]`. Each kind has a limit below: the number of findings that are
there. A change may lower it, never raise it.
"""

import ast
import re
import sys
import tokenize
from pathlib import Path

LIMITS = {"first word": 0, "phrase": 0, "long sentence": 0}
_FIRST = re.compile(r"(What|Of|As|How|Where|Those|Whether|That|Which|So)\b")
_PHRASE = re.compile(
    r"\b(so many|so long|so often|looked at|is told|are told|was told|told of|is said|are said"
    r"|beside|behind|is seen|are seen|others? than|what is)\b",
    re.IGNORECASE,
)
_MOST_WORDS = 30


def texts(path: Path):
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text, not isinstance(node, ast.Module)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# "), False


def findings(path: Path):
    for line, text, is_docstring in texts(path):
        if is_docstring and _FIRST.match(text):
            yield line, "first word", text.splitlines()[0]
        for match in _PHRASE.finditer(text):
            yield line, "phrase", match.group()
        for sentence in re.split(r"(?<=[.:;?!])\s|\n\s*\n", text):
            if len(sentence.split()) > _MOST_WORDS:
                yield line, "long sentence", " ".join(sentence.split()[:8])


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[1:] if name != "--list"]
    paths = paths or sorted(Path("src").rglob("*.py"))
    counts = dict.fromkeys(LIMITS, 0)
    for path in paths:
        for line, kind, words in findings(path):
            counts[kind] += 1
            if "--list" in sys.argv:
                print(f"{path}:{line}: {kind}: {words}")
    print(counts)
