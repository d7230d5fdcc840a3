"""Compilation of the user's code with changes, for runs of which nothing is kept.

Loops can then end early: `for x in xs:` becomes `for x in LOOPS(7, xs):` if its body steps or
evaluates, and a `while` whose body steps becomes such a loop. Calls with an unused value can be
left out: `log(x)` becomes `if CALLS[4]: log(x); CALLS[5]`. Assignments before such a call that
nothing else reads go into the same block. Lines and columns are unchanged, and so are Python's
cached bytecode files.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from flatout.observe.sites import is_users
from flatout.observe.unused_calls import (
    CALLS,
    EVALUATES,
    UnusedCall,
    is_compiled,
    last_name,
    with_conditions,
)

_LOOPS = "__flatout_loops__"
"""Name in builtins of the function that wraps the iterables of loops."""
_TURN = "__flatout_turn__"
"""Loop variable of a loop that was a `while`."""
_STEPS = {"step", "backward", "training_step", "train_on_batch", "minimize"}
"""Methods that make a function which calls them a stepping function."""
# Maximum number of files of the script that are parsed.
_MOST_FILES = 200
_COMPILES = re.compile(
    rb"torch\.(compile|jit)\b|\.compile\(\s*\)|\bnumba\b|from torch import .*compile"
)


def names_that_step(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of functions that step an optimizer, or call a function that does."""
    calls: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                calls.setdefault(node.name, set()).update(_called([node]))
    result = set(_STEPS)
    while more := {name for name, called in calls.items() if called & result} - result:
        result |= more
    return result


def names_in_a_step(trees: Iterable[ast.Module], stepping: set[str]) -> set[str]:
    """Return the names of functions that the innermost stepping loops call."""
    calls: dict[str, set[str]] = {}
    result: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                calls.setdefault(node.name, set()).update(_called([node]))
            elif isinstance(node, (ast.For, ast.While)):
                inner = [part for item in node.body for part in ast.walk(item)]
                loops = [part for part in inner if isinstance(part, (ast.For, ast.While))]
                called = {*_called(node.body)}
                if called & stepping and not any(
                    {*_called(loop.body)} & stepping for loop in loops
                ):
                    result |= called
    while more := {name for item in result for name in calls.get(item, ())} - result:
        result |= more
    return result & calls.keys()


def files_of(script: Path, home: Path) -> dict[Path, ast.Module]:
    """Return the script, and the modules of its folder that its code imports."""
    result = {script: _parsed(script)}
    todo = [script]
    while todo and len(result) < _MOST_FILES:
        file = todo.pop()
        for node in ast.walk(result[file]):
            for path in _imported(node, file.parent, home):
                if path not in result and path.is_file():
                    result[path] = _parsed(path)
                    todo.append(path)
    return result


def _imported(node: ast.AST, folder: Path, home: Path) -> Iterator[Path]:
    names: list[str] = []
    base = home
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            base = folder
            for _ in range(node.level - 1):
                base = base.parent
        inside = f"{node.module}." if node.module else ""
        names = [node.module or "", *(inside + alias.name for alias in node.names)]
    for name in filter(None, names):
        path = base.joinpath(*name.split("."))
        yield from (path.with_suffix(".py"), path / "__init__.py")


def steps_schedules(trees: Iterable[ast.Module]) -> bool:
    """Return whether a line in these files steps an object with a scheduler's name or class."""
    receivers: set[str] = set()
    schedulers: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and last_name(node.func) == "step":
                receivers.add(last_name(getattr(node.func, "value", node.func)))
            if isinstance(node, ast.Assign) and _is_scheduler(node.value):
                schedulers |= {last_name(target) for target in node.targets}
    return any(name in schedulers or _is_named_so(name) for name in receivers)


def _is_scheduler(value: ast.expr) -> bool:
    made = last_name(value.func) if isinstance(value, ast.Call) else ""
    return made.endswith(("LR", "OnPlateau")) or _is_named_so(made)


def _is_named_so(name: str) -> bool:
    return "sched" in name.lower()


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(_text(file))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _text(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _called(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Call):
                yield last_name(part.func)


class Rewriting:
    """Compiler of the user's files that wraps loops, and puts conditions before calls.

    Attributes:
        loops: file and line of each loop; the index in this list is the loop's id.
        steps_schedules: whether a line of the files steps a scheduler.
        is_compiled: whether the files compile functions; they are then left unchanged.
        calls: calls with an unused value; the index in this list is the call's id.
        makes: whether each call is made, at twice its id. The next entry is only read, when the
            call has ended.
    """

    def __init__(self, command: list[str]) -> None:
        if command[0] == "-m":
            home = Path.cwd()
            script = home.joinpath(*command[1].split(".")).with_suffix(".py")
        else:
            script = Path(command[0]).resolve()
            home = script.parent
        self._home = home.resolve()
        files = files_of(script, self._home)
        # Tools that compile functions must find the code as it was written.
        self.is_compiled = any(_COMPILES.search(_text(file)) for file in files)
        trees = files.values()
        self._stepping = names_that_step(trees)
        self._in_step = names_in_a_step(trees, self._stepping)
        self.steps_schedules = steps_schedules(trees)
        self.loops: list[tuple[str, int]] = []
        self.calls: list[UnusedCall] = []
        self.makes: list[Any] = []

    def install(self, around: Callable[[int, Iterable[Any]], Iterable[Any]]) -> None:
        """Begin to rewrite all modules that are imported."""
        setattr(builtins, _LOOPS, around)
        setattr(builtins, CALLS, self.makes)
        original = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            path = loader.get_filename(fullname)
            # Cached bytecode of own modules is neither read nor written.
            is_own = (
                not self.is_compiled
                and is_users(path)
                and Path(path).resolve().is_relative_to(self._home)
            )
            return self.code(loader.get_data(path), path) if is_own else original(loader, fullname)

        SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]

    def code(self, source: bytes, file: str) -> CodeType:
        """Return the rewritten code of a file; the plain code where that is not possible."""
        plain = compile(source, file, "exec", dont_inherit=True)
        if self.is_compiled:
            return plain
        try:
            tree = _Loops(self._stepping, self._number(file)).visit(ast.parse(source, file))
            tree, calls = with_conditions(tree, file, len(self.calls), self._in_step)
            code = compile(tree, file, "exec", dont_inherit=True)
            self.calls += calls
            self.makes += [True, None] * len(calls)
            return code
        except (RecursionError, SystemError, ValueError):  # nested too deeply
            return plain

    def _number(self, file: str) -> Callable[[int], int]:
        file = os.fspath(file)

        def number(line: int) -> int:
            self.loops.append((file, line))
            return len(self.loops) - 1

        return number


class _Loops(ast.NodeTransformer):
    """Wrapper of the iterable of a loop whose body steps or evaluates."""

    def __init__(self, stepping: set[str], number: Callable[[int], int]) -> None:
        self._stepping = stepping
        self._number = number
        self._evaluates = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        decorators = {last_name(item) for item in node.decorator_list}
        if is_compiled(node):
            return node
        return self._within(node, bool(decorators & EVALUATES))

    def visit_With(self, node: ast.With) -> ast.AST:
        entered = {last_name(item.context_expr) for item in node.items}
        return self._within(node, self._evaluates or bool(entered & EVALUATES))

    def _within(self, node: ast.AST, evaluates: bool) -> ast.AST:
        before, self._evaluates = self._evaluates, evaluates
        self.generic_visit(node)
        self._evaluates = before
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        called = {*_called(node.body)}
        no_grad = any(
            {last_name(item.context_expr) for item in part.items} & EVALUATES
            for item in node.body
            for part in ast.walk(item)
            if isinstance(part, ast.With)
        )
        self.generic_visit(node)
        if called & self._stepping or (called and (self._evaluates or no_grad)):
            iterable = node.iter
            number = ast.copy_location(ast.Constant(self._number(node.lineno)), iterable)
            around = ast.copy_location(ast.Name(_LOOPS, ast.Load()), iterable)
            node.iter = ast.copy_location(ast.Call(around, [number, iterable], []), iterable)
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        called = {*_called(node.body)}
        self.generic_visit(node)
        if node.orelse or not called & self._stepping or not _can_end(node):
            return node
        number, test = self._number(node.lineno), node.test
        around = ast.Call(
            ast.Name(_LOOPS, ast.Load()), [ast.Constant(number), ast.Constant(None)], []
        )
        leaves = ast.If(ast.UnaryOp(ast.Not(), test), [ast.Break()], [])
        turns = ast.For(ast.Name(_TURN, ast.Store()), around, [leaves, *node.body], [])
        ast.copy_location(turns, node)
        for part in (turns.target, *ast.walk(around), leaves, leaves.test, leaves.body[0]):
            ast.copy_location(part, test)
        return turns


def _can_end(node: ast.While) -> bool:
    return not isinstance(node.test, ast.Constant) or any(map(_breaks, node.body))


def _breaks(node: ast.AST) -> bool:
    if isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return any(map(_breaks, getattr(node, "orelse", ())))
    return isinstance(node, ast.Break) or any(map(_breaks, ast.iter_child_nodes(node)))
