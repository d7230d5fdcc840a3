"""State dicts of the best weights that a script keeps to load later, found by its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.observe.observation import Site
from flatout.observe.origins import function_at, is_at, parsed
from flatout.observe.unused_calls import last_name


def loaded_later(site: Site) -> Site | None:
    """Return where a state dict is loaded that `site` takes as the best one, or None."""
    function, tree = function_at(site.file, site.line), parsed(site.file)
    if function is None or tree is None:
        return None
    conditions = [node for node in ast.walk(function) if isinstance(node, ast.If)]
    guards = [node for node in conditions if _guards(node, site.line)]
    name = next(_assigned(function, site.line), "")
    # A name is valid in its function, an attribute in the whole file.
    scope = tree if name.startswith(".") else function
    if not (guards and name) or _is_read_elsewhere(scope, name):
        return None
    for call in ast.walk(scope):
        if (
            isinstance(call, ast.Call)
            and last_name(call) == "load_state_dict"
            and call.args
            and _name_of(call.args[0]) == name
            and not is_at(guards[0], call.lineno)
        ):
            return Site(site.file, call.lineno)
    return None


def _guards(node: ast.If, line: int) -> bool:
    if not any(is_at(inner, line) for inner in node.body):
        return False
    compared = [inner for inner in ast.walk(node.test) if isinstance(inner, ast.Compare)]
    orders = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    return any(isinstance(order, orders) for inner in compared for order in inner.ops)


def _assigned(function: ast.AST, line: int) -> Iterator[str]:
    for target, value in _given(function):
        if is_at(value, line) and _calls(value) and _is_state_or_constant(value):
            yield _name_of(target)


def _given(scope: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(scope):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value


def _is_read_elsewhere(scope: ast.AST, name: str) -> bool:
    plain = {id(target) for target, value in _given(scope) if _is_state_or_constant(value)}
    for node in ast.walk(scope):
        if isinstance(node, ast.arg) and node.arg == name:
            return True
        if not (isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)):
            continue
        if _name_of(node) == name and id(node) not in plain:
            return True
    return False


def _is_state_or_constant(value: ast.expr) -> bool:
    calls = _calls(value)
    return not calls or any(last_name(call) == "state_dict" for call in calls)


def _calls(value: ast.expr) -> list[ast.Call]:
    return [node for node in ast.walk(value) if isinstance(node, ast.Call)]


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _name_of(node.value)
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
