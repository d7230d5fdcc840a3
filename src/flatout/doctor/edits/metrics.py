"""Edit of a metric that each iteration of a loop computes, but only code after the loop reads."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence

from flatout.doctor.edits.code import Code, Unsure, inside, name_of
from flatout.doctor.edits.place import FoundAt
from flatout.doctor.finding import Edit

_READS = (
    *("abs", "argmax", "cat", "clone", "concatenate", "cpu", "detach", "exp", "flatten", "float"),
    *("int", "long", "mean", "numpy", "ravel", "reshape", "round", "sigmoid", "softmax", "squeeze"),
    *("stack", "sum", "tolist", "view"),
)
"""Methods that change nothing."""

_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Raise)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def after_loop(at: FoundAt) -> list[Edit]:
    """Move the statement that computes a metric after its loop.

    Only the value of the last iteration can have been read, and all operands still have their
    values after the loop.
    """
    code, statement = at.code, at.statement
    loop = code.parents[statement]
    if not isinstance(loop, ast.For) or loop.orelse or statement not in loop.body:
        raise Unsure("it stands in no loop, or under a condition")
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        raise Unsure("the statement is not a single call with one result")
    target = statement.targets[0]
    if len(statement.targets) != 1 or not isinstance(target, ast.Name):
        raise Unsure("its value has no name")
    place = loop.body.index(statement)
    if any(isinstance(node, _LEAVES) for node in inside(loop.body[:place])):
        raise Unsure("the last turn may leave before it")
    _must_be_read_behind(code, target, loop)
    _must_stay(code, statement.value, loop.body[place + 1 :], target.id)
    return _moved(code, statement, loop)


def _must_be_read_behind(code: Code, target: ast.Name, loop: ast.For) -> None:
    function = code.function(loop)
    if code.above(loop, ast.Try) is not None:
        raise Unsure("an error may be caught that leaves the loop")
    uses = [n for n in ast.walk(code.tree) if isinstance(n, ast.Name) and n.id == target.id]
    for use in uses:
        if use is target:
            continue
        if code.is_within(use, loop):
            raise Unsure("it is read in the loop")
        owner = code.function(use)
        if owner is not function and (function is code.tree or code.is_within(owner, function)):
            raise Unsure("another function may read it")
    for node in ast.walk(code.tree):
        if isinstance(node, (ast.Global, ast.Nonlocal)) and target.id in node.names:
            raise Unsure("another function may read it")


def _must_stay(code: Code, value: ast.Call, rest: Sequence[ast.stmt], target: str) -> None:
    known = _known(code)
    made_of: set[str] = set()
    for node in ast.walk(value):
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Starred, *_FUNCTIONS)):
            raise Unsure("it does more than to read")
        if isinstance(node, ast.Name) and node.id not in known:
            made_of.add(node.id)
        if isinstance(node, ast.Call) and _root(node.func) not in known:
            is_method = isinstance(node.func, ast.Attribute) and name_of(node.func) in _READS
            if not is_method:
                raise Unsure("what is called there may change something")
    if target in made_of:
        raise Unsure("it is made of the turn before")
    names = {node.id for node in inside(rest) if isinstance(node, ast.Name)}
    if made_of & names:
        raise Unsure("what it is made of is used again in the same turn")


def _known(code: Code) -> set[str]:
    imports = [n for n in ast.walk(code.tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    result = {
        alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names
    }
    stores = {
        node.id
        for node in ast.walk(code.tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    defined = {
        n.name for n in ast.walk(code.tree) if isinstance(n, (*_FUNCTIONS[:2], ast.ClassDef))
    }
    return (result | set(dir(builtins))) - stores - defined


def _root(func: ast.expr) -> str:
    while isinstance(func, ast.Attribute):
        func = func.value
    return func.id if isinstance(func, ast.Name) else ""


def _moved(code: Code, statement: ast.stmt, loop: ast.For) -> list[Edit]:
    if len(loop.body) == 1 or not code.has_own_lines(statement):
        raise Unsure("nothing else stands in the loop, or on its line")
    words = code.source.text[code.begin(statement) : code.end(statement)]
    if statement is loop.body[-1]:
        begin = code.begin(statement)
        inner = len(code.indent(statement))
        return [code.edit((begin - inner, begin, code.indent(loop)))]
    return [code.without(statement), code.edit(code.after(loop, words))]
