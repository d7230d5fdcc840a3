"""Edits of evaluation: without gradients, and in eval mode."""

from __future__ import annotations

import ast

from flatout.doctor.edits.code import Code, Unsure, first_line, inside, name_of
from flatout.doctor.edits.names import is_imported, passed
from flatout.doctor.edits.place import FoundAt
from flatout.doctor.finding import Edit

_TRAINS = ("backward", "manual_backward", "step", "grad", "requires_grad_", "zero_grad")
_NO_GRADIENTS = ("no_grad", "inference_mode")


def no_grad(at: FoundAt) -> list[Edit]:
    """Put evaluation under no_grad.

    A function that only evaluates gets `@torch.no_grad()`. Other code gets a `with` block.
    """
    code, statement = at.code, at.statement
    if not is_imported(code, "torch"):
        raise Unsure("torch has another name here")
    function = code.function(statement)
    if isinstance(function, ast.FunctionDef) and _only_evaluates(at, function):
        return [code.edit(code.before_line(function.lineno, "@torch.no_grad()"))]
    evaluation = _evaluation(code, statement)
    if _is_called_elsewhere_in(at, evaluation):
        raise Unsure("the model may be trained there too")
    return [code.edit(*code.under("with torch.no_grad():", [evaluation]))]


def _only_evaluates(at: FoundAt, function: ast.FunctionDef) -> bool:
    nodes = list(inside(function.body))
    if _trains(nodes) or not any(_is_eval(node) for node in nodes):
        return False
    is_plain = not any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes)
    return is_plain and not _is_called_elsewhere_in(at, function)


def _is_called_elsewhere_in(at: FoundAt, statement: ast.stmt) -> bool:
    lines = range(first_line(statement), (statement.end_lineno or statement.lineno) + 1)
    sites = [model.site for model in at.seen.models if model.site]
    within = [site for site in sites if site.file == at.file and site.line in lines]
    return any(site.line != at.line for site in within)


def _evaluation(code: Code, statement: ast.stmt) -> ast.stmt:
    result: ast.AST | None = statement
    while isinstance(result, ast.stmt):
        block = code.block(result)
        before = block[: block.index(result)]
        if any(_is_eval(item.value) for item in before if isinstance(item, ast.Expr)):
            if _trains(list(ast.walk(result))):
                raise Unsure("it trains too")
            return result
        result = code.above(result, ast.stmt)
        if isinstance(result, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            break
    raise Unsure("where the evaluation begins cannot be seen")


def _trains(nodes: list[ast.AST]) -> bool:
    return any(isinstance(node, ast.Call) and name_of(node.func) in _TRAINS for node in nodes)


def _is_eval(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and name_of(node.func) == "eval" and not node.args


def eval_first(at: FoundAt) -> list[Edit]:
    """Add `model.eval()` before an evaluation, and `model.train()` after it."""
    if at.is_told:
        raise Unsure("Keras' layers get training= in each call")
    code = at.code
    model = at.model()
    around = _without_gradients(code, at.statement)
    if isinstance(around, ast.FunctionDef):
        if not isinstance(model, ast.Name):
            raise Unsure("the model is not passed by its name")
        outside = passed(code, around, model.id)
        if not isinstance(outside, (ast.Name, ast.Attribute)):
            raise Unsure("the model has no name where it is passed")
        model, around = outside, code.statement(outside)
    if not isinstance(around, (ast.With, ast.Assign, ast.AnnAssign, ast.Expr)):
        raise Unsure("the model that is evaluated is a part of something else")
    if any(isinstance(node, (ast.Return, ast.Break, ast.Continue)) for node in inside([around])):
        raise Unsure("the evaluation is left from within")
    name = ast.unparse(model)
    before, after = code.before(around, f"{name}.eval()"), code.after(around, f"{name}.train()")
    is_long = around.lineno != around.end_lineno
    return [code.edit(before), code.edit(after)] if is_long else [code.edit(before, after)]


def _without_gradients(code: Code, statement: ast.stmt) -> ast.stmt:
    result: ast.AST | None = statement
    while result is not None:
        if isinstance(result, ast.With):
            managers = [item.context_expr for item in result.items]
            if any(_is_manager(manager) for manager in managers):
                return result
        if isinstance(result, ast.FunctionDef):
            if any(_is_manager(item) for item in result.decorator_list):
                return result
            break
        result = code.above(result, ast.With, ast.FunctionDef)
    raise Unsure("where the evaluation begins cannot be seen")


def _is_manager(node: ast.expr) -> bool:
    func = node.func if isinstance(node, ast.Call) else node
    return name_of(func) in _NO_GRADIENTS
