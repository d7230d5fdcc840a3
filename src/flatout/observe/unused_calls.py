"""Calls in the user's code whose value is unused, found by source, such as prints and logs.

Such a statement is only a call, or stores the call's value in a list or dict that nothing else in
the function reads. Assignments just before the statement belong to it if nothing else reads them.
The source does not show whether a call affects training: `side_effects.py` checks that.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

CALLS = "__flatout_calls__"
"""Name in builtins of the list that says whether each call is made."""
EVALUATES = {"no_grad", "inference_mode"}
_WELL_KNOWN = {"staticmethod", "classmethod", "property", "contextmanager", "override", "wraps"}
"""Decorators that leave a function as Python code; no function with others is changed."""
_TRAINS = {
    *("step", "backward", "zero_grad", "train", "eval", "update_parameters", "load_state_dict"),
    *("manual_seed", "seed", "set_epoch", "scale", "to", "cuda", "compile", "requires_grad"),
    *("barrier", "all_reduce", "all_gather", "broadcast", "reduce", "send", "recv", "wait"),
    *("start", "join", "put", "get", "acquire", "release", "close", "set_grad_enabled"),
    *("register_hook", "register_forward_hook", "super", "exit", "_exit", "setattr", "exec"),
}
"""Names of functions that are never left out, whatever their side effects."""


def last_name(node: ast.expr) -> str:
    """Return `c` for `a.b.c` and for its call; "" for a node without a name."""
    if isinstance(node, ast.Call):
        node = node.func
    return str(getattr(node, "attr", getattr(node, "id", "")))


def is_compiled(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a decorator may replace the function, as those of numba and triton do."""
    decorators = {last_name(decorator) for decorator in node.decorator_list}
    return bool(decorators - _WELL_KNOWN - EVALUATES)


@dataclass(frozen=True)
class UnusedCall:
    """A call that can be left out.

    Attributes:
        file: path of the file with the call.
        line, end_line: first and last line of the call, including assignments that belong to it.
        call_line: line of the call itself.
        words: source text of the called expression.
        reads: receiver and arguments of the call that are names or attributes; the call may change
            these.
    """

    file: str
    line: int
    end_line: int
    call_line: int
    words: str
    reads: tuple[str, ...]


def with_conditions(
    tree: ast.Module, file: str, first: int, in_step: Collection[str] = ()
) -> tuple[ast.Module, list[UnusedCall]]:
    """Put a condition before each unused call in functions and loops; return tree and calls."""
    conditions = _Conditions(tree, file, first, in_step)
    tree = conditions.visit(tree)
    return tree, conditions.calls


class _Conditions(ast.NodeTransformer):
    def __init__(self, tree: ast.Module, file: str, first: int, in_step: Collection[str]) -> None:
        self.calls: list[UnusedCall] = []
        self._file, self._first = file, first
        self._imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        self._in_step = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name in in_step
        ]
        self._scope: ast.AST = tree
        self._loads = _loads([tree])
        self._is_within = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node if is_compiled(node) else self._scoped(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node if is_compiled(node) else self._scoped(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        before, self._is_within = self._is_within, False
        self.generic_visit(node)
        self._is_within = before
        return node

    def _scoped(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        before = self._scope, self._loads, self._is_within
        self._scope, self._loads, self._is_within = node, _loads([node]), True
        self._blocks(node)
        self._scope, self._loads, self._is_within = before
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._loop(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._loop(node)

    def _loop(self, node: ast.For | ast.While) -> ast.AST:
        before, self._is_within = self._is_within, True
        self._blocks(node)
        self._is_within = before
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        return self._blocks(node)

    def visit_With(self, node: ast.With) -> ast.AST:
        return self._blocks(node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        return self._blocks(node)

    def _blocks(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if self._is_within:
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list) and block:
                    setattr(node, name, [*self._with_conditions(block)])
        return node

    def _with_conditions(self, block: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for statement in block:
            call = self._unused(statement)
            if call is None:
                result.append(statement)
                continue
            group = [statement]
            while result and self._is_read_by(result[-1], group):
                group.insert(0, result.pop())
            result.append(self._condition(group, call))
        return result

    def _unused(self, statement: ast.stmt) -> ast.Call | None:
        call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
        if not isinstance(call, ast.Call):
            return None
        if isinstance(statement, ast.Assign):
            stores = statement.targets
            if not all(
                isinstance(store, ast.Subscript) and self._is_kept(store) for store in stores
            ):
                return None
        name = last_name(call.func)
        if name in _TRAINS or not name or (name.endswith("_") and not name.endswith("__")):
            return None
        if any(
            isinstance(n, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr))
            for n in ast.walk(statement)
        ):
            return None
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(statement, ast.Assign):  # storing a value that nothing reads has no effect
            return call
        if receiver is None or _root(receiver) in self._imported or _is_self(receiver):
            return call
        return None if self._is_read(receiver) else call

    def _is_kept(self, store: ast.Subscript) -> bool:
        return not self._is_read(store.value)

    def _is_read(self, what: ast.expr) -> bool:
        text = ast.unparse(what)
        loops = [node for node in ast.walk(self._scope) if isinstance(node, (ast.For, ast.While))]
        where: list[ast.AST] = [part for loop in loops for part in loop.body] or [self._scope]
        if _read_in(where, text):
            return True
        # A method that a step calls may read the attribute.
        methods = [item for item in self._in_step if item is not self._scope]
        return text.startswith("self.") and any(_read_in([method], text) for method in methods)

    def _is_read_by(self, statement: ast.stmt, group: list[ast.stmt]) -> bool:
        if not isinstance(statement, ast.Assign):
            return False
        names: list[str] = []
        for target in statement.targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            if not all(isinstance(part, ast.Name) for part in parts):
                return False
            names += [part.id for part in parts if isinstance(part, ast.Name)]
        within = _loads(group)
        if any(
            isinstance(item, (ast.Yield, ast.YieldFrom, ast.Await)) for item in ast.walk(statement)
        ):
            return False
        return all(0 < within[name] == self._loads[name] for name in names)

    def _condition(self, group: list[ast.stmt], call: ast.Call) -> ast.stmt:
        number = 2 * (self._first + len(self.calls))
        first = group[0]
        self.calls.append(
            UnusedCall(
                self._file,
                first.lineno,
                group[-1].end_lineno or first.lineno,
                group[-1].lineno,
                ast.unparse(call.func),
                tuple(dict.fromkeys(_named(call))),
            )
        )

        def read(at: int, where: ast.stmt) -> ast.expr:
            result = ast.Subscript(ast.Name(CALLS, ast.Load()), ast.Constant(at), ast.Load())
            for node in ast.walk(result):
                ast.copy_location(node, where)
            return result

        last = ast.copy_location(ast.Expr(read(number + 1, group[-1])), group[-1])
        return ast.copy_location(ast.If(read(number, first), [*group, last], []), first)


def _read_in(nodes: list[ast.AST], text: str) -> bool:
    receivers: set[int] = set()
    seen: set[int] = set()
    for node in (part for root in nodes for part in ast.walk(root)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            func = node.value.func
            if isinstance(func, ast.Attribute):
                receivers.add(id(func.value))
        elif isinstance(node, ast.Assign):
            receivers |= {
                id(target.value) for target in node.targets if isinstance(target, ast.Subscript)
            }
        elif (
            isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
            and isinstance(node.ctx, ast.Load)
            and ast.unparse(node) == text
        ):
            seen.add(id(node))
    return not seen <= receivers


def _loads(nodes: Iterable[ast.AST]) -> Counter[str]:
    return Counter(
        part.id
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Store)
    )


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _named(call: ast.Call) -> Iterator[str]:
    parts = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    for part in [*parts, *call.args, *(word.value for word in call.keywords)]:
        node = part
        while isinstance(node, ast.Attribute):
            node = node.value
        if isinstance(node, ast.Name):
            yield ast.unparse(part)
