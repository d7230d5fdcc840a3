"""Edits of models: memory format, autocast, and names in saved state dicts."""

from __future__ import annotations

import ast

from flatout.doctor.edits.code import Unsure, inside, name_of
from flatout.doctor.edits.names import is_imported, values
from flatout.doctor.edits.place import FoundAt
from flatout.doctor.finding import Edit

_WRAPPERS = {
    "module": ("DistributedDataParallel", "DDP", "DataParallel"),
    "_orig_mod": ("compile",),
}
_LEAVES = ("numpy", "tolist", "item")
_ENDS = ("backward", "manual_backward", "zero_grad")


def channels_last(at: FoundAt) -> list[Edit]:
    """Add a line after the model is made that converts its weights to channels_last."""
    code, model = at.code, at.model()
    made = values(code, model)
    if not is_imported(code, "torch") or len(made) != 1:
        raise Unsure("where the model is made cannot be seen")
    statement = code.statement(made[0])
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        raise Unsure("the model is made together with something else")
    name = ast.unparse(statement.targets[0])
    if not isinstance(statement.targets[0], (ast.Name, ast.Attribute)):
        raise Unsure("the model is made together with something else")
    return [code.edit(code.after(statement, f"{name}.to(memory_format=torch.channels_last)"))]


def autocast(at: FoundAt) -> list[Edit]:
    """Put `with torch.autocast(...)` around forward and loss."""
    code, first = at.code, at.statement
    at.model()
    if not is_imported(code, "torch") or "autocast" in code.source.text:
        raise Unsure("something casts already, or torch has another name")
    block = code.block(first)
    rest = block[block.index(first) :]
    ends = [n for n, item in enumerate(rest) if _called(item) & set(_ENDS)]
    under = rest[: ends[0]] if ends else []
    losses = {
        call.func.value.id
        for item in rest
        for call in inside([item])
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "backward"
        and isinstance(call.func.value, ast.Name)
    }
    assigned = {
        node.id
        for item in under
        for node in inside([item])
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    if not under or len(losses) != 1 or not losses <= assigned:
        raise Unsure("where forward and loss end cannot be seen")
    if any(_called(item) & set(_LEAVES) for item in under):
        raise Unsure("numbers leave torch in between")
    device = at.seen.device.partition(":")[0]
    return [code.edit(*code.under(f'with torch.autocast("{device}", torch.bfloat16):', under))]


def _called(statement: ast.stmt) -> set[str]:
    return {name_of(node.func) for node in inside([statement]) if isinstance(node, ast.Call)}


def save_bare(at: FoundAt) -> list[Edit]:
    """Change `model.state_dict()` to `model.module.state_dict()`, if the file loads no state."""
    code = at.code
    if any(name_of(call) == "load_state_dict" for call in ast.walk(code.tree)):
        raise Unsure("the file loads what it saves")
    attribute = "_orig_mod" if "_orig_mod." in at.finding.what else "module"
    result = []
    wrappers = _WRAPPERS[attribute]
    for call in code.calls(at.line):
        if name_of(call.func) == "state_dict" and isinstance(call.func, ast.Attribute):
            made = values(code, call.func.value)[-1:]
            if any(isinstance(v, ast.Call) and name_of(v.func) in wrappers for v in made):
                result.append(call.func.value)
    if len(result) != 1:
        raise Unsure("which model is wrapped cannot be seen")
    end = code.outer_end(result[0])
    return [code.edit((end, end, f".{attribute}"))]
