"""Edits of single tensors: detach, a later read by the host, index_select."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from flatout.doctor.edits.code import Code, Unsure, inside, name_of
from flatout.doctor.edits.place import FoundAt
from flatout.doctor.finding import Edit

_BACKWARD = ("backward", "manual_backward")
_KEEPS = (ast.BinOp, ast.Tuple, ast.List, ast.Dict)
"""Expressions that pass on a tensor unchanged, or a result with its graph."""

_FILLS = ("append", "extend", "insert", "add", "update", "setdefault", "appendleft")


def detach(at: FoundAt) -> list[Edit]:
    """Detach the losses that are summed or collected in the function around the line."""
    code = at.code
    function = code.function(at.statement)
    nodes = list(inside(function.body))
    backwards = [n for n in nodes if isinstance(n, ast.Call) and name_of(n.func) in _BACKWARD]
    losses = {_operand(call).id for call in backwards}
    kept = [item for node in nodes for item in _kept(code, node, losses)]
    if not kept:
        raise Unsure("where a graph is kept cannot be seen")
    edits = []
    for name, target in kept:
        if not _is_past(code, name, backwards):
            _must_not_train(code, function, nodes, target, backwards)
        edits.append(code.edit((code.end(name), code.end(name), ".detach()")))
    return edits


def _operand(call: ast.Call) -> ast.Name:
    assert isinstance(call.func, (ast.Attribute, ast.Name))
    tensor: ast.expr = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if call.args:
        tensor = call.args[0]
    if isinstance(tensor, ast.Call) and name_of(tensor.func) == "scale" and len(tensor.args) == 1:
        tensor = tensor.args[0]
    if isinstance(tensor, ast.BinOp) and isinstance(tensor.op, (ast.Div, ast.Mult)):
        tensor = tensor.left
    if not isinstance(tensor, ast.Name):
        raise Unsure("what is differentiated has no name")
    return tensor


def _kept(code: Code, node: ast.AST, losses: set[str]) -> Iterator[tuple[ast.Name, ast.expr]]:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        target: ast.expr = node.target
        value = node.value
    elif isinstance(node, ast.Call) and name_of(node.func) == "append" and len(node.args) == 1:
        if not isinstance(code.parents[node], ast.Expr) or not isinstance(node.func, ast.Attribute):
            return
        target, value = node.func.value, node.args[0]
    else:
        return
    if isinstance(target, ast.Name) and target.id in losses:
        return
    for name in ast.walk(value):
        if isinstance(name, ast.Name) and name.id in losses and _passes(code, name, value):
            yield name, target


def _passes(code: Code, name: ast.AST, value: ast.expr) -> bool:
    while name is not value:
        name = code.parents[name]
        if not isinstance(name, _KEEPS):
            return False
    return True


def _is_past(code: Code, name: ast.Name, backwards: Sequence[ast.Call]) -> bool:
    if any(call.keywords or len(call.args) > 1 for call in backwards):
        return False
    statement = code.statement(name)
    block = code.block(statement)
    before = block[: block.index(statement)]
    own = [c for c in backwards if _operand(c).id == name.id]
    return bool(own) and all(
        isinstance(code.parents[c], ast.Expr) and code.parents[c] in before for c in own
    )


def _must_not_train(
    code: Code,
    function: ast.AST,
    nodes: Sequence[ast.AST],
    target: ast.expr,
    backwards: Sequence[ast.Call],
) -> None:
    if not isinstance(target, ast.Name):
        raise Unsure("what is kept may be used elsewhere")
    elsewhere = (n for n in ast.walk(code.tree) if isinstance(n, ast.Name) and n.id == target.id)
    if any(code.function(node) is not function for node in elsewhere):
        raise Unsure("what is kept may be used elsewhere")
    reached = {target.id}
    while True:
        more = {name for node in nodes for name in _derived(node, reached)} - reached
        if not more:
            break
        reached |= more
    for node in nodes:
        is_end = isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) or (
            isinstance(node, ast.Call) and (node in backwards or name_of(node.func) == "grad")
        )
        if is_end and _names(node) & reached:
            raise Unsure("what is kept may be trained on")


def _derived(node: ast.AST, reached: set[str]) -> set[str]:
    if isinstance(node, ast.Call) and name_of(node.func) in _FILLS:
        return _names(node.func) if any(_names(arg) & reached for arg in node.args) else set()
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        source: ast.AST | None = node.value
    else:
        source = node.iter if isinstance(node, (ast.For, ast.comprehension)) else None
    if source is None or not _names(source) & reached:
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
    return {name for target in targets for name in _names(target)}


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def read_later(at: FoundAt) -> list[Edit]:
    """Change `total += loss.item()` to a sum on the device, if only formatted numbers use it.

    The sum is in double precision, as Python's own, and thus equal to the last bit.
    """
    result = at.seen_call("item")
    if result.detail.get("by") or at.seen.device.partition(":")[0] not in ("cpu", "cuda"):
        raise Unsure("it is read in another way")
    call, statement, code = at.call("item"), at.statement, at.code
    if not isinstance(statement, ast.AugAssign) or not isinstance(statement.op, ast.Add):
        raise Unsure("it is not added up")
    if not isinstance(statement.target, ast.Name) or call.args:
        raise Unsure("it is not added up under a name")
    _scaled_only(code, call, statement.value)
    _formatted_only(code, statement)
    begin = code.end(call.func) - len("item")
    return [code.edit((begin, code.end(call), "detach().double()"))]


def _scaled_only(code: Code, call: ast.AST, value: ast.expr) -> None:
    while call is not value:
        above = code.parents[call]
        if not isinstance(above, ast.BinOp) or not isinstance(above.op, (ast.Mult, ast.Div)):
            raise Unsure("it is used for more than a sum")
        if above.left is not call or not _is_count(above.right):
            raise Unsure("it is used for more than a sum")
        call = above


def _is_count(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float))
    if isinstance(node, ast.Subscript):
        return name_of(node.value) == "shape" and isinstance(node.slice, ast.Constant)
    return isinstance(node, ast.Call) and (
        name_of(node.func) == "len"
        or (name_of(node.func) in ("size", "numel") and len(node.args) < 2)
    )


def _formatted_only(code: Code, added: ast.AugAssign) -> None:
    assert isinstance(added.target, ast.Name)
    function = code.function(added)
    uses = [n for n in ast.walk(code.tree) if isinstance(n, ast.Name) and n.id == added.target.id]
    for use in uses:
        if code.function(use) is not function:
            raise Unsure("the sum is used elsewhere")
        if use is not added.target and not (_is_zeroed(code, use) or _is_formatted(code, use)):
            raise Unsure("the sum is used for more than a text")


def _is_zeroed(code: Code, use: ast.Name) -> bool:
    above = code.parents[use]
    if isinstance(above, ast.Tuple):
        assign = code.parents[above]
        values = (
            assign.value.elts
            if (isinstance(assign, ast.Assign) and isinstance(assign.value, ast.Tuple))
            else []
        )
        value = values[above.elts.index(use)] if len(values) == len(above.elts) else None
    else:
        value = above.value if isinstance(above, ast.Assign) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, (int, float))


def _is_formatted(code: Code, use: ast.AST) -> bool:
    above = code.parents[use]
    while isinstance(above, ast.BinOp) and isinstance(above.op, (ast.Mult, ast.Div)):
        if above.left is not use:
            return False
        use, above = above, code.parents[above]
    if not isinstance(above, ast.FormattedValue) or above.conversion != -1:
        return False
    spec = above.format_spec
    words = spec.values if isinstance(spec, ast.JoinedStr) else []
    last = words[-1] if words else None
    return isinstance(last, ast.Constant) and str(last.value).endswith(("f", "e", "g", "%"))


def index_select(at: FoundAt) -> list[Edit]:
    """Change `x[rows]` to `x.index_select(0, rows)`, if rows was observed to be a list of rows."""
    code = at.code
    places = at.seen_call("index").detail.get("rows") or []
    changes = []
    for line, column, end_line, end_column in places:
        here = (line, column, end_line, end_column)
        nodes = [node for node in code.heads(at.line) if _place_of(node) == here]
        if len(nodes) != 1 or not isinstance(nodes[0], ast.Subscript):
            raise Unsure("what was indexed cannot be seen")
        changes += _as_method(code, nodes[0])
    if not changes:
        raise Unsure("it was not observed that whole rows are picked")
    return [code.edit(*changes)]


def _place_of(node: ast.AST) -> tuple[int, int, int, int] | None:
    if not isinstance(node, ast.expr):
        return None
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _as_method(code: Code, node: ast.Subscript) -> list[tuple[int, int, str]]:
    is_simple = isinstance(node.slice, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    if not is_simple or not isinstance(node.ctx, ast.Load):
        raise Unsure("it is indexed in another way")
    bracket, words = code.next_token(code.outer_end(node.value))
    end = code.end(node)
    if words != "[":
        raise Unsure("where its bracket is cannot be seen")
    return [(bracket, bracket + 1, ".index_select(0, "), (end - 1, end, ")")]
