"""Origin of the batches in a loop without a DataLoader: the lines that make the model's input.

The names in a model's call are traced through the source of its function, and of the functions that
call it, to the lines that assign them.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from flatout.observe.sites import is_users

# Maximum number of calling functions that are searched above the function that calls the model.
_LEVELS = 4

Place = tuple[str, int]


def origins(call: Place, callers: Sequence[Place]) -> set[Place]:
    """Return the lines that make a model's input; none where their source cannot be read."""
    places: set[Place] = set()
    wanted: set[str] | None = None
    for file, line in [call, *callers][: _LEVELS + 1]:
        function = function_at(file, line)
        if function is None:
            break
        names = _given(function, line)
        if wanted is not None:  # return all parameters, since the caller may use other names
            names |= _given_through(function, line)
        lines, left = _slice(function, names, line)
        places |= {(file, line) for line in lines}
        wanted = left & _parameters(function)
        if not wanted:
            break
    return places


@lru_cache(maxsize=64)
def parsed(file: str) -> ast.Module | None:
    """Return the syntax tree of a file; None if it is not plain Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # no plain Python, such as notebook commands
        return None


def users_code() -> Iterator[tuple[str, ast.Module]]:
    """Yield name and syntax tree of each loaded file of the user, sorted by name."""
    files = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    for file in sorted(file for file in files if file.endswith(".py") and is_users(file)):
        tree = parsed(file)
        if tree is not None:
            yield file, tree


def is_at(node: ast.stmt | ast.expr, line: int) -> bool:
    """Return whether a node spans the line."""
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def function_at(file: str, line: int) -> ast.AST | None:
    """Return the innermost function around a line, else the whole file; None if not parsable."""
    tree = parsed(file)
    best: ast.AST | None = tree
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if is_at(node, line):
            best = node  # ast.walk visits inner functions later
    return best


def _parameters(function: ast.AST) -> set[str]:
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return set()
    given = function.args
    return {item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _calls_at(function: ast.AST, line: int) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and is_at(node, line):
            yield node


def _given(function: ast.AST, line: int) -> set[str]:
    return {
        name
        for call in _calls_at(function, line)
        for given in (*call.args, *(keyword.value for keyword in call.keywords))
        for name in _read_in(given)
    }


def _given_through(function: ast.AST, line: int) -> set[str]:
    return {
        name
        for call in _calls_at(function, line)
        if isinstance(call.func, ast.Attribute)
        for name in _read_in(call.func.value)
        if name != "self"
    }


def _read_in(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id


def _slice(function: ast.AST, names: Iterable[str], before: int) -> tuple[set[int], set[str]]:
    wanted, lines = set(names), set[int]()
    statements = [made for node in ast.walk(function) if (made := _made(node)) is not None]
    is_new = True
    while is_new:
        is_new = False
        for first, targets, value in statements:
            last = value.end_lineno or value.lineno
            if first <= before <= last or first in lines or wanted.isdisjoint(targets):
                continue
            lines |= set(range(first, last + 1))
            wanted |= set(_read_in(value))
            is_new = True
    return lines, wanted


def _made(node: ast.AST) -> tuple[int, set[str], ast.expr] | None:
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, (ast.AugAssign, ast.NamedExpr, ast.AnnAssign)) and node.value:
        targets, value = [node.target], node.value
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        targets, value = [node.target], node.iter
    else:
        return None
    names = {
        inner.id
        for target in targets
        for inner in ast.walk(target)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    return node.lineno, names, value
