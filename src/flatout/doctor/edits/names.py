"""Values of names in the user's code, as far as one file shows them for certain."""

from __future__ import annotations

import ast

from flatout.doctor.edits.code import Code, Unsure, inside, name_of

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEEP = 4


def values(code: Code, name: ast.expr, depth: int = 0) -> list[ast.expr]:
    """Return all values that are assigned to a name or an attribute of `self`, in file order.

    The value of a function's parameter is the argument of the only call of that function.
    """
    if depth > _DEEP:
        raise Unsure("the name is passed on too often")
    if isinstance(name, ast.Attribute):
        return _of_attribute(code, name)
    if not isinstance(name, ast.Name):
        return [name]
    scope: ast.AST = code.function(name)
    while True:
        result = _assigned(scope, name.id)
        if result:
            return result
        if isinstance(scope, _FUNCTIONS) and name.id in _parameters(scope):
            return values(code, passed(code, scope, name.id), depth + 1)
        if isinstance(scope, ast.Module):
            raise Unsure(f"what {name.id} is cannot be seen")
        scope = code.function(scope)


def made_by(code: Code, name: ast.expr, *kinds: str) -> ast.Call:
    """Return the only call of these names, such as DataLoader(...), that made a value."""
    calls: list[ast.Call] = []
    for value in [name] if isinstance(name, ast.Call) else values(code, name):
        if isinstance(value, ast.Call):
            calls.append(value)
        elif isinstance(value, (ast.Name, ast.Attribute)):
            calls.append(made_by(code, value, *kinds))
    result = [call for call in calls if name_of(call.func) in kinds]
    if len(result) != 1:
        raise Unsure(f"which {kinds[0]} it is cannot be seen")
    return result[0]


def calls_of(code: Code, *names: str) -> list[ast.Call]:
    """Return all calls of these names in a file."""
    every = (node for node in ast.walk(code.tree) if isinstance(node, ast.Call))
    return [call for call in every if name_of(call.func) in names]


def is_imported(code: Code, name: str) -> bool:
    """Return True if a module is imported in a file, and its name means nothing else there."""
    imports = (node for node in code.tree.body if isinstance(node, ast.Import))
    bound = {
        alias.asname or alias.name.partition(".")[0]: alias.name.partition(".")[0]
        for node in imports
        for alias in node.names
        if alias.asname is None or "." not in alias.name
    }
    scopes = (n for n in ast.walk(code.tree) if isinstance(n, (*_FUNCTIONS, ast.Module)))
    return bound.get(name) == name and not any(_assigned(scope, name) for scope in scopes)


def _assigned(scope: ast.AST, name: str) -> list[ast.expr]:
    result: list[tuple[int, ast.expr]] = []
    for node in inside(getattr(scope, "body", [])):
        if isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
            same = [v for t, v in pairs if isinstance(t, ast.Name) and t.id == name]
            result += [(node.lineno, value) for value in same]
            targets: list[ast.AST] = [t for t, _ in pairs if not isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign):
            if isinstance(node.target, ast.Name) and node.target.id == name and node.value:
                result.append((node.lineno, node.value))
            continue
        elif isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            raise Unsure(f"{name} is shared with other functions")
        else:
            targets = _other_targets(node)
        bound = (n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
        if any(n.id == name and isinstance(n.ctx, ast.Store) for n in bound):
            raise Unsure(f"what {name} is cannot be seen")
    return [value for _, value in sorted(result, key=lambda value: value[0])]


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        both = [*target.elts, *value.elts]
        if len(target.elts) == len(value.elts) and not any(
            isinstance(item, ast.Starred) for item in both
        ):
            return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _other_targets(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension, ast.AugAssign, ast.NamedExpr)):
        return [] if isinstance(node, ast.comprehension) else [node.target]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [item.optional_vars for item in node.items if item.optional_vars]
    return []


def _parameters(scope: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = scope.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [arg.arg for arg in every if arg is not None]


def passed(code: Code, scope: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> ast.expr:
    """Return the argument that the only call of a function passes for a parameter."""
    calls = calls_of(code, scope.name)
    uses = [
        node
        for node in ast.walk(code.tree)
        if isinstance(node, (ast.Name, ast.Attribute)) and name_of(node) == scope.name
    ]
    if len(uses) != 1 or len(calls) != 1:
        raise Unsure(f"{scope.name} is not called once alone")
    call = calls[0]
    keyword = next((word for word in call.keywords if word.arg == name), None)
    if keyword is not None:
        return keyword.value
    positional = [arg.arg for arg in (*scope.args.posonlyargs, *scope.args.args)]
    if positional[:1] == ["self"]:
        positional = positional[1:]
    is_plain = not any(isinstance(arg, ast.Starred) for arg in call.args)
    if is_plain and name in positional and positional.index(name) < len(call.args):
        return call.args[positional.index(name)]
    raise Unsure(f"what is passed for {name} cannot be seen")


def _of_attribute(code: Code, name: ast.Attribute) -> list[ast.expr]:
    owner = code.above(name, ast.ClassDef)
    if not (isinstance(name.value, ast.Name) and name.value.id == "self" and owner):
        raise Unsure(f"what {ast.unparse(name)} is cannot be seen")
    words = ast.unparse(name)
    result: list[ast.expr] = []
    for node in ast.walk(owner):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(ast.unparse(target) == words for target in targets):
            assert isinstance(node, ast.Assign)
            result.append(node.value)
    if not result:
        raise Unsure(f"what {words} is cannot be seen")
    return result
