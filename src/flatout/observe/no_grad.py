"""Lines by which a model's forward always calls its layers without gradients.

An example is `with torch.no_grad():`. Lines in a branch of an if/else are left out, such as where a
backbone is frozen only in the first steps.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from types import FrameType

from flatout.observe.observation import Site
from flatout.observe.origins import parsed
from flatout.observe.sites import is_users

_SWITCHES_OFF = frozenset(("no_grad", "inference_mode"))
# Maximum number of forward functions of the user that are searched, innermost first.
_LEVELS = 8
# Only forward is searched: a loop around the model disables gradients on purpose.
_FORWARD = "forward"


def no_grad_above(frame: FrameType | None) -> Site | None:
    """Return the line that always disables gradients for this frame's call; None if none does."""
    levels = 0
    while frame is not None and levels < _LEVELS:
        if is_users(frame.f_code.co_filename) and frame.f_code.co_name == _FORWARD:
            levels += 1
            line = _switched_off(frame.f_code.co_filename, frame.f_lineno)
            if line is not None:
                return Site(frame.f_code.co_filename, line)
        frame = frame.f_back
    return None


@lru_cache(maxsize=64)
def _blocks(file: str) -> tuple[tuple[int, int, int], ...]:
    tree = parsed(file)
    if tree is None:
        return ()
    chosen = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and node.orelse
        for inner in ast.walk(node)
    }
    result = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.AsyncWith)) and node not in chosen:
            switches = [item.context_expr for item in node.items]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            switches = node.decorator_list
        else:
            continue
        result += [
            (node.body[0].lineno, node.end_lineno or node.lineno, switch.lineno)
            for switch in switches
            if _is_off(switch)
        ]
    return tuple(result)


def _is_off(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        if node.args or node.keywords:
            return False
        node = node.func
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in _SWITCHES_OFF


def _switched_off(file: str, line: int) -> int | None:
    blocks = [(begin, off_at) for begin, end, off_at in _blocks(file) if begin <= line <= end]
    return max(blocks)[1] if blocks else None
