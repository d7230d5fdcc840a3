"""Calls that go: what is tidied up in each step though no one needs it."""

from __future__ import annotations

import ast

from flatout.doctor.edits.code import Unsure
from flatout.doctor.edits.place import FoundAt
from flatout.doctor.finding import Edit


def empty_cache(at: FoundAt) -> list[Edit]:
    """The statement `torch.cuda.empty_cache()` goes."""
    return _without(
        at, "empty_cache", ("torch.cuda.empty_cache", "cuda.empty_cache", "empty_cache")
    )


def collect(at: FoundAt) -> list[Edit]:
    """The statement `gc.collect()` goes."""
    return _without(at, "collect", ("gc.collect",))


def _without(at: FoundAt, name: str, written: tuple[str, ...]) -> list[Edit]:
    call = at.call(name)
    statement = at.code.parents[call]
    if ast.unparse(call.func) not in written or not isinstance(statement, ast.Expr):
        raise Unsure("it is a part of something else")
    if any(not isinstance(arg, ast.Constant) for arg in call.args) or call.keywords:
        raise Unsure("its arguments may do something themselves")
    return [at.code.without(statement)]
