"""Edits of the device on which tensors are made, and of copies to a device."""

from __future__ import annotations

import ast

from flatout.doctor.edits.code import Unsure, name_of
from flatout.doctor.edits.place import FoundAt
from flatout.doctor.finding import Edit

_COPIES = ("to", "cuda")
_CONSTANT = ("zeros", "ones", "full", "arange", "eye", "empty")
"""Functions of torch that give the same numbers on any device."""


def do_not_block(at: FoundAt) -> list[Edit]:
    """Add non_blocking=True to each copy on a line."""
    result = [call for call in at.code.calls(at.line) if name_of(call.func) in _COPIES]
    if not result:
        raise Unsure("no copy stands on the line")
    if any(isinstance(arg, ast.Constant) and arg.value == "cpu" for c in result for arg in c.args):
        raise Unsure("a tensor goes to the host on the line: that must have come before it is read")
    changes = [at.code.with_arguments(call, non_blocking="True") for call in result]
    return [at.code.edit(*(change for some in changes for change in some))]


def on_device(at: FoundAt) -> list[Edit]:
    """Change `torch.ones(3).to(device)` to `torch.ones(3, device=device)`."""
    code = at.code
    result = [call for call in code.calls(at.line) if name_of(call.func) in _COPIES]
    made = [(call, call.func.value) for call in result if isinstance(call.func, ast.Attribute)]
    pairs = [(call, item) for call, item in made if _is_constant(item)]
    if len(pairs) != 1:
        raise Unsure("the tensors that are made there are not known")
    copy, made_by = pairs[0]
    assert isinstance(made_by, ast.Call)
    if copy.keywords or len(copy.args) > 1 or any(w.arg == "device" for w in made_by.keywords):
        raise Unsure("more than the device is asked for")
    device = '"cuda"'
    if copy.args:
        (given,) = copy.args
        device = code.source.text[code.begin(given) : code.end(given)]
        if not _names_a_device(given):
            raise Unsure("a type may be asked for")
    elif name_of(copy.func) == "to":
        raise Unsure("the target device is not known")
    changes = code.with_arguments(made_by, device=device)
    return [code.edit(*changes, (code.outer_end(made_by), code.end(copy), ""))]


def _is_constant(node: ast.AST) -> bool:
    is_torch = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_torch and name_of(node.func) in _CONSTANT and _is_module(node.func.value)  # type: ignore[attr-defined]


def _is_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _names_a_device(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return (
        "device" in name_of(node).lower() if isinstance(node, (ast.Name, ast.Attribute)) else False
    )
