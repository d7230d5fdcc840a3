"""Edits that remove needless calls from each step."""

from __future__ import annotations

import ast

from flatout.doctor.edits.code import Unsure
from flatout.doctor.edits.place import FoundAt
from flatout.doctor.finding import Edit

_OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
"""Keywords of `checkpoint`; all other keywords belong to the module that `checkpoint` calls."""


def empty_cache(at: FoundAt) -> list[Edit]:
    """Remove the statement `torch.cuda.empty_cache()`."""
    return _without(
        at, "empty_cache", ("torch.cuda.empty_cache", "cuda.empty_cache", "empty_cache")
    )


def collect(at: FoundAt) -> list[Edit]:
    """Remove the statement `gc.collect()`."""
    return _without(at, "collect", ("gc.collect",))


def checkpointing(at: FoundAt) -> list[Edit]:
    """Change `checkpoint(part, x, use_reentrant=False)` to `part(x)`."""
    code, call = at.code, at.call("checkpoint")
    if not call.args or not isinstance(call.args[0], (ast.Name, ast.Attribute)):
        raise Unsure("what is checkpointed has no name")
    if any(keyword.arg in (None, "context_fn") for keyword in call.keywords):
        raise Unsure("what is computed again cannot be seen")
    given = [*call.args[1:], *(word for word in call.keywords if word.arg not in _OPTIONS)]
    words = ", ".join(code.source.text[code.begin(node) : code.end(node)] for node in given)
    part = ast.unparse(call.args[0])
    return [code.edit((code.begin(call), code.end(call), f"{part}({words})"))]


def _without(at: FoundAt, name: str, written: tuple[str, ...]) -> list[Edit]:
    call = at.call(name)
    statement = at.code.parents[call]
    if ast.unparse(call.func) not in written or not isinstance(statement, ast.Expr):
        raise Unsure("it is a part of something else")
    if any(not isinstance(arg, ast.Constant) for arg in call.args) or call.keywords:
        raise Unsure("its arguments may do something themselves")
    return [at.code.without(statement)]
