"""Edits within loops: run a call in some steps only, set_epoch, train()."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from flatout.doctor.edits.arguments import given, loader
from flatout.doctor.edits.code import Change, Code, Unsure, inside, name_of
from flatout.doctor.edits.names import is_imported, made_by
from flatout.doctor.edits.place import FoundAt
from flatout.doctor.finding import Edit

EVERY = 50
"""Number of steps between two lines of a log, after the edit."""

_TELLS = ("debug", "info", "warning", "log", "add_scalar", "add_scalars", "add_histogram")
_READS = (
    *("item", "detach", "mean", "sum", "norm", "float", "int", "str", "len", "round", "format"),
    *("tolist", "cpu", "numpy", "min", "max", "abs", "sqrt", "size", "join", "time", "dict"),
    *("perf_counter", "get_last_lr", "memory_allocated", "max_memory_allocated"),
)
"""Calls that may be part of a logged expression, because they change nothing."""

_MUTATES = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "clear")


def tell_less(at: FoundAt) -> list[Edit]:
    """Put `if step % 50 == 0:` before a line that prints or logs."""
    statement, code = at.statement, at.code
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not _only_tells(at, call):
        raise Unsure("the call may do more than report")
    return [code.edit(*code.under(f"if {_step(code, statement)} % {EVERY} == 0:", [statement]))]


def call_less(at: FoundAt) -> list[Edit]:
    """Put a condition before a call that was observed not to change the training.

    Assignments that only this call reads are put under the condition too. If no loop has a step
    number, a counter is added.
    """
    call, code = at.statement, at.code
    first = next((item.first for item in at.seen.left_out if str(item.site) == at.finding.where), 0)
    group = [item for item in code.block(call) if (first or call.lineno) <= item.lineno]
    group = group[: group.index(call) + 1]
    try:
        return [code.edit(*code.under(f"if {_step(code, call)} % {EVERY} == 0:", group))]
    except Unsure:
        name = _unused(code, "_calls")
        head = f"if next({name}) % {EVERY} == 0:"
        lines = ("import itertools", "", f"{name} = itertools.count()")
        last = _last_import(code)
        counter = code.after(last, *lines) if last else code.before(code.tree.body[0], *lines)
        return [code.edit(counter), code.edit(*code.under(head, group))]


def _unused(code: Code, name: str) -> str:
    while name in code.source.text:
        name += "_"
    return name


def _last_import(code: Code) -> ast.stmt | None:
    last = None
    for statement in code.tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            last = statement
        elif not isinstance(statement, ast.Expr):
            break
    return last


def _only_tells(at: FoundAt, call: ast.Call) -> bool:
    for node in inside([*call.args, *call.keywords]):
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            return False
        if isinstance(node, ast.Call) and name_of(node.func) not in _READS:
            return False
    if not isinstance(call.func, ast.Attribute):
        return isinstance(call.func, ast.Name) and call.func.id == "print"
    receiver = call.func.value
    if call.func.attr not in _TELLS or (isinstance(receiver, ast.Name) and receiver.id == "self"):
        return False
    return all(_keeps_nothing(method) for method in _methods(at.code, receiver, call.func.attr))


def _methods(code: Code, receiver: ast.expr, name: str) -> list[ast.FunctionDef]:
    classes = {node.name: node for node in ast.walk(code.tree) if isinstance(node, ast.ClassDef)}
    if not classes or not isinstance(receiver, (ast.Name, ast.Attribute)):
        return []
    every = [
        method
        for owner in classes.values()
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and method.name == name
    ]
    try:
        made = name_of(made_by(code, receiver, *classes).func)
    except Unsure:
        return every  # the receiver may be of any of these classes
    return [method for method in every if code.parents[method] is classes[made]]


def _keeps_nothing(method: ast.FunctionDef) -> bool:
    for node in ast.walk(method):
        is_set = isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(
            node.ctx, (ast.Store, ast.Del)
        )
        if is_set or isinstance(node, (ast.Global, ast.Nonlocal)):
            return False
        if isinstance(node, ast.Call) and name_of(node.func) in _MUTATES:
            return False
    return True


def _step(code: Code, statement: ast.stmt) -> str:
    loop = code.above(statement, ast.For, ast.While)
    if not isinstance(loop, ast.For) or code.function(loop) is not code.function(statement):
        raise Unsure("it is in no loop that counts")
    name = _counter(loop)
    stores = [
        node
        for node in inside(loop.body)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
    ]
    if name and not stores:
        return name
    raise Unsure("nothing counts the steps")


def _counter(loop: ast.For) -> str:
    made = name_of(loop.iter.func) if isinstance(loop.iter, ast.Call) else ""
    target = loop.target
    if made == "enumerate" and isinstance(target, ast.Tuple):
        target = target.elts[0]
    elif made != "range":
        return ""
    return target.id if isinstance(target, ast.Name) else ""


def set_epoch(at: FoundAt) -> list[Edit]:
    """Add `sampler.set_epoch(epoch)` at the beginning of each epoch."""
    code = at.code
    loops = [loader for loader in at.seen.loaders if str(loader.site) == at.finding.where]
    if not any(loop.is_distributed for loop in loops):
        raise Unsure("no sampler of several ranks was observed")
    _, call = loader(at)
    sampler = next((word.value for word in call.keywords if word.arg == "sampler"), None)
    name = ""
    if isinstance(sampler, ast.Name) and code.is_within(sampler, code.function(at.statement)):
        name = sampler.id
    return [code.edit(_with_epoch(at, name))]


def _with_epoch(at: FoundAt, sampler: str) -> Change:
    code, loop = at.code, at.statement
    if not isinstance(loop, ast.For):
        raise Unsure("the line is no loop")
    if not sampler:
        sampler = f"{_iterated(code, loop)}.sampler"
    function = code.function(loop)
    outer = code.above(loop, ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(outer, ast.For) and isinstance(outer.target, ast.Name) and _counter(outer):
        if _is_made_in(outer, sampler):
            raise Unsure("the sampler is made again in each epoch")
        return code.before(outer.body[0], f"{sampler}.set_epoch({outer.target.id})")
    if isinstance(function, ast.FunctionDef) and "epoch" in [a.arg for a in function.args.args]:
        return code.before(loop, f"{sampler}.set_epoch(epoch)")
    raise Unsure("which epoch it is cannot be seen")


def _is_made_in(loop: ast.For, name: str) -> bool:
    stores = (n for n in ast.walk(loop) if isinstance(getattr(n, "ctx", None), ast.Store))
    return any(f"{name}.".startswith(f"{ast.unparse(node)}.") for node in stores)


def _iterated(code: Code, loop: ast.For) -> str:
    result = []
    for node in ast.walk(loop.iter):
        if isinstance(node, (ast.Name, ast.Attribute)):
            try:
                made_by(code, node, "DataLoader")
            except Unsure:
                continue
            result.append(ast.unparse(node))
    if len(result) != 1:
        raise Unsure("which DataLoader it is cannot be seen")
    return result[0]


def share_samples(at: FoundAt) -> list[Edit]:
    """Give the loader a DistributedSampler, and call set_epoch on it."""
    code, call = loader(at)
    if code is not at.code or not is_imported(code, "torch"):
        raise Unsure("what a sampler is called there is not known")
    shuffle = given(call, "shuffle")
    if len(call.args) != 1 or {"sampler", "batch_sampler"} & {word.arg for word in call.keywords}:
        raise Unsure("it has its own sampler")
    data = ast.unparse(call.args[0])
    if not isinstance(call.args[0], (ast.Name, ast.Attribute)):
        raise Unsure("the samples have no name")
    order = "" if shuffle is not None and shuffle.value is True else ", shuffle=False"
    sampler = f"torch.utils.data.DistributedSampler({data}{order})"
    word = next((word for word in call.keywords if word.arg == "shuffle"), None)
    if word is not None:
        changes = [(code.begin(word), code.end(word), f"sampler={sampler}")]
    else:
        changes = code.with_arguments(call, sampler=sampler)
    edits = [code.edit(*changes)]
    return [*edits, code.edit(_with_epoch(_iterating(at), ""))] if not order else edits


def _iterating(at: FoundAt) -> FoundAt:
    loops = {
        str(one.site)
        for one in at.seen.loaders
        if str(one.made_at) == at.finding.where and one.site
    }
    return FoundAt.of(replace(at.finding, where=loops.pop()), at.seen) if len(loops) == 1 else at


def train_again(at: FoundAt) -> list[Edit]:
    """Add `model.train()` before the steps of each epoch."""
    if at.is_told:
        raise Unsure("Keras' layers get training= in each call")
    code, model = at.code, ast.unparse(at.model())
    loop = code.above(at.statement, ast.For, ast.While, ast.FunctionDef)
    if not isinstance(loop, (ast.For, ast.While)):
        raise Unsure("it is in no loop")
    evaluating = {
        node.name
        for node in ast.walk(code.tree)
        if isinstance(node, ast.FunctionDef) and "eval" in _called(node)
    }
    if ({"eval"} | evaluating) & set(_called(loop)):
        return [code.edit(code.before(loop.body[0], f"{model}.train()"))]
    return [code.edit(code.before(loop, f"{model}.train()"))]


def _called(node: ast.AST) -> Iterator[str]:
    return (name_of(part.func) for part in ast.walk(node) if isinstance(part, ast.Call))
