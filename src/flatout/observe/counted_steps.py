"""Optimizer steps that a loop takes only in every n-th iteration, according to the user's code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.observe.observation import Site
from flatout.observe.origins import parsed

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


def is_counted(backward: Site, step: Site) -> bool:
    """Return whether the backward passes of several iterations go into a step.

    The first case: the step is under an `if` with a remainder in its test, and the backward pass is
    above it, in the same iteration of the same loop. The second case: the step follows a loop
    around the backward pass, and the names in that loop say that the loop is over parts of a batch.
    Several losses of one iteration, such as those of a GAN, match neither case.
    """
    tree = parsed(step.file)
    if tree is None or backward.file != step.file:
        return False
    to_step, to_backward = path_to(tree, step.line), path_to(tree, backward.line)
    above = [at for at, (one, other) in enumerate(zip(to_step, to_backward, strict=False))
             if one is other]  # fmt: skip
    if not above:
        return False
    behind, around = to_step[above[-1] + 1 :], to_backward[above[-1] + 1 :]
    if any(isinstance(node, (*LOOPS, *_FUNCTIONS)) for node in behind):
        return False
    within = [node for node in around if isinstance(node, (*LOOPS, *_FUNCTIONS))]
    if within:
        return len(within) == 1 and _is_over_parts(within[0])
    scope = next((node for node in to_step[::-1] if isinstance(node, _FUNCTIONS)), tree)
    return any(isinstance(node, ast.If) and _has_remainder(node.test, scope) for node in behind)


def _is_over_parts(loop: ast.AST) -> bool:
    if not isinstance(loop, ast.For):
        return False
    words = f"{ast.unparse(loop.target)} {ast.unparse(loop.iter)}".lower()
    return "accum" in words or "micro" in words


def path_to(tree: ast.AST, line: int) -> list[ast.AST]:
    """Return the statements around a line, outermost first."""
    path = [tree]
    while True:
        inner = next((node for node in _statements(path[-1]) if _spans(node, line)), None)
        if inner is None:
            return path
        path.append(inner)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield child


def _spans(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None)
    return first <= line <= (last or first)


def _has_remainder(test: ast.expr, scope: ast.AST) -> bool:
    if _divides(test):
        return True
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return any(
        isinstance(node, ast.Assign)
        and _divides(node.value)
        and any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
        for node in ast.walk(scope)
    )


def _divides(value: ast.expr) -> bool:
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(value)
    )
