"""Edits of the arguments of zero_grad, optimizers, DataLoader and DistributedDataParallel."""

from __future__ import annotations

import ast
import multiprocessing
from contextlib import suppress

from flatout.doctor.edits.code import Change, Code, Unsure, name_of
from flatout.doctor.edits.names import calls_of, is_imported, made_by
from flatout.doctor.edits.place import FoundAt
from flatout.doctor.finding import Edit

_LOADERS = ("DataLoader",)
_BRANCHES = (ast.If, ast.IfExp, ast.While, ast.Match, ast.Try)
_WRAPPERS = ("DistributedDataParallel", "DDP")
_POSITION = {
    "shuffle": 2,
    "sampler": 3,
    "num_workers": 5,
    "pin_memory": 7,
    "drop_last": 8,
    "persistent_workers": 13,
}
"""Positions of those arguments that DataLoader also takes by position."""


def forget_gradients(at: FoundAt) -> list[Edit]:
    """Change zero_grad(set_to_none=False) to zero_grad(), if nothing reads the zeros."""
    call = at.call("zero_grad")
    keyword = next((word for word in call.keywords if word.arg == "set_to_none"), None)
    if call.args or keyword is None or not _is(keyword.value, False):
        raise Unsure("zeros are not asked for here alone")
    if any(model.unused_parameters for model in at.seen.models):
        raise Unsure("a parameter without a gradient is stepped by zeros, and would not be without")
    for code in at.codes():
        _must_always_train_all(code)
    return [at.code.edit(*at.code.without_argument(call, keyword))]


def _must_always_train_all(code: Code) -> None:
    for node in ast.walk(code.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("grad", "requires_grad"):
            raise Unsure("the code reads gradients, or checks for missing ones")
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            if any(isinstance(part, _BRANCHES) for part in ast.walk(node)):
                raise Unsure("a part of the model may be left out in some steps")
        elif isinstance(node, ast.Call) and name_of(node.func) == "requires_grad_":
            raise Unsure("parameters may be frozen on the way")


def fuse(at: FoundAt) -> list[Edit]:
    """Add fused=True to the only optimizer of its class."""
    steps = at.call("step")
    kinds = {
        optimizer.kind.rpartition(".")[2] for optimizer in at.seen.optimizers if not optimizer.fused
    }
    if len(kinds) != 1 or not isinstance(steps.func, ast.Attribute):
        raise Unsure("which optimizer it is cannot be seen")
    kind = kinds.pop()
    try:
        code, call = at.code, made_by(at.code, steps.func.value, kind)
    except Unsure:
        code, call = at.only_call(kind)
    if {word.arg for word in call.keywords} & {"foreach", "differentiable"}:
        raise Unsure("it is asked to step in another way")
    return [code.edit(*code.with_arguments(call, fused="True"))]


def no_search(at: FoundAt) -> list[Edit]:
    """Remove find_unused_parameters=True from DistributedDataParallel."""
    code, call = at.only_call(*_WRAPPERS)
    keyword = next((w for w in call.keywords if w.arg == "find_unused_parameters"), None)
    if keyword is None or not _is(keyword.value, True):
        raise Unsure("find_unused_parameters=True is not set here")
    return [code.edit(*code.without_argument(call, keyword))]


def threads(at: FoundAt) -> list[Edit]:
    """Set the number of threads in torch.set_num_threads as the finding's Recipe has it."""
    call = at.call("set_num_threads")
    count = at.finding.recipe.get("process.threads")
    if len(call.args) != 1 or not isinstance(call.args[0], ast.Constant) or not count:
        raise Unsure("the number of threads comes from elsewhere")
    return [at.code.edit((at.code.begin(call.args[0]), at.code.end(call.args[0]), str(count)))]


def workers(at: FoundAt) -> list[Edit]:
    """Set num_workers and the number of threads as the finding's Recipe has them.

    The finding "workers_zero" also makes the workers persistent.
    """
    count = at.finding.recipe.get("input.workers")
    if not isinstance(count, int):
        raise Unsure("the number of workers is not known")
    code, call = loader(at)
    given(call, "num_workers")
    stays = given(call, "persistent_workers")
    if stays is not None and not count:
        raise Unsure("without workers none can stay")
    _starts_safely(code, call)
    values = {"num_workers": str(count)}
    if count and stays is None and at.finding.name == "workers_zero":
        values["persistent_workers"] = "True"
    threads = at.finding.recipe.get("process.threads")
    before = [] if threads is None else [_threads_before(code, call, threads)]
    return [code.edit(*before, *code.with_arguments(call, **values))]


def _threads_before(code: Code, call: ast.Call, count: int) -> Change:
    if calls_of(code, "set_num_threads") or not is_imported(code, "torch"):
        raise Unsure("the place where threads are set is not known")
    statement = code.statement(call)
    begin = code.begin(statement)
    indent = code.lines[statement.lineno - 1][: begin - code.starts[statement.lineno - 1]]
    if indent.strip():
        raise Unsure("another statement stands before it on its line")
    return begin, begin, f"torch.set_num_threads({count})\n{indent}"


def stay(at: FoundAt) -> list[Edit]:
    """Set persistent_workers=True."""
    return _set(at, "persistent_workers")


def pin(at: FoundAt) -> list[Edit]:
    """Set pin_memory=True."""
    return _set(at, "pin_memory")


def drop_last(at: FoundAt) -> list[Edit]:
    """Set drop_last=True."""
    return _set(at, "drop_last")


def loader(at: FoundAt) -> tuple[Code, ast.Call]:
    """Return the call that makes the DataLoader of the line.

    The call stands on the line itself, or it made the DataLoader that the loop there iterates over.
    """
    result = [call for call in at.code.calls(at.line) if name_of(call.func) in _LOADERS]
    if not result and isinstance(at.statement, (ast.For, ast.AsyncFor)):
        for name in ast.walk(at.statement.iter):
            with suppress(Unsure):
                if isinstance(name, (ast.Name, ast.Attribute)):
                    result.append(made_by(at.code, name, *_LOADERS))
    if len(result) == 1:
        return at.code, result[0]
    return at.only_call(*_LOADERS)


def given(call: ast.Call, name: str) -> ast.Constant | None:
    """Return the value of an argument of DataLoader; None if the call does not pass it."""
    if any(isinstance(arg, ast.Starred) for arg in call.args):
        raise Unsure("what is passed by * is not known")
    if len(call.args) > _POSITION[name]:
        raise Unsure("the argument is given by position")
    value = next((word.value for word in call.keywords if word.arg == name), None)
    if value is not None and not isinstance(value, ast.Constant):
        raise Unsure("it comes from elsewhere")
    return value


def _set(at: FoundAt, name: str) -> list[Edit]:
    code, call = loader(at)
    given(call, name)
    return [code.edit(*code.with_arguments(call, **{name: "True"}))]


def _starts_safely(code: Code, call: ast.Call) -> None:
    is_forked = multiprocessing.get_all_start_methods()[0] == "fork"
    guards = (node.test for node in code.tree.body if isinstance(node, ast.If))
    is_guarded = any("__name__" in ast.unparse(test) for test in guards)
    if not (is_forked or is_guarded or not isinstance(code.function(call), ast.Module)):
        raise Unsure("workers that are spawned would run the script again")


def _is(node: ast.expr, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
