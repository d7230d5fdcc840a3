"""The program of a written `forward` as a graph, where the graph is sure to be the same program.

torch.fx runs `forward` once on stand-ins for tensors and records what is done to them. It does not
see the rest: which branch was taken, a context that was entered, a list that was appended to. So a
forward is traced only where there is no rest: it is a straight line of assignments that ends in a
return, and so is every function of the user's that it calls. Plain attributes that it reads become
constants of the graph; they are handed back, so that a call can see whether they still hold.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from flatout.data.randomness import random_state, set_random_state

_SCALARS = (bool, int, float, str, type(None))
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.Return)
# Expressions that run a part of the code only sometimes, later, or that assign on the way.
_BRANCHES = (
    ast.IfExp,
    ast.BoolOp,
    ast.Lambda,
    ast.comprehension,
    ast.NamedExpr,
    ast.Await,
    ast.Yield,
    ast.YieldFrom,
)
# torch's own code is trusted, but for what changes the code around it.
_CONTEXTS = ("torch.utils._contextlib", "torch.utils.checkpoint", "torch.amp", "torch.autograd")


@dataclass(frozen=True)
class Traced:
    """A module's forward as a graph.

    Attributes:
        graph: calls every submodule as a module, but for the plain Sequentials in `inlined`.
        constants: plain attributes of the module that the graph holds as constants.
        inlined: Sequentials whose members the graph calls one by one.
    """

    graph: fx.Graph
    constants: dict[str, Any]
    inlined: list[nn.Module]


def trace(module: nn.Module) -> Traced | None:
    """The graph of `module.forward`, or None where a graph might not be the same program."""
    forward = type(module).forward
    if is_watched(module) or not _takes_positions_only(forward):
        return None
    read: set[str] = set()
    tracer = _Tracer()
    attributes = set(vars(module))
    before = random_state()
    try:
        with _only_straight_code(read):
            graph = tracer.trace(module)
    except Exception:
        return None
    finally:
        # torch.fx leaves tensors that it met in the module.
        met = [vars(module).pop(name) for name in vars(module).keys() - attributes]
        drew = not _same(random_state(), before)
        set_random_state(before)
    constants = _constants(module, read)
    if met or drew or constants is None:
        return None
    return Traced(graph, constants, tracer.inlined)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody hooked this module, or replaced its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )


class _Tracer(fx.Tracer):
    """Looks into plain Sequentials; every other module stays a module."""

    def __init__(self) -> None:
        super().__init__()
        # Otherwise forward would write into the buffers themselves.
        self.proxy_buffer_attributes = True
        self.inlined: list[nn.Module] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether the graph calls `m` as a whole."""
        if type(m) is not nn.Sequential or is_watched(m):
            return True
        self.inlined.append(m)
        return False


def _takes_positions_only(forward: Any) -> bool:
    """Without defaults and keywords: `x is None` is decided while tracing, once for all calls."""
    if not isinstance(forward, FunctionType) or _straight(forward.__code__) is None:
        return False
    return all(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(forward).parameters.values()
    )


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    others = ("python", "numpy")
    return torch.equal(a["torch"], b["torch"]) and all(
        pickle.dumps(a[name]) == pickle.dumps(b[name]) for name in others
    )


def _constants(module: nn.Module, read: set[str]) -> dict[str, Any] | None:
    """The plain attributes among the names that were read; None if one is not plain."""
    constants = {name: vars(module)[name] for name in read & vars(module).keys()}
    others = (part for part in module.modules() if part is not module)
    if not all(isinstance(value, _SCALARS) for value in constants.values()):
        return None
    if any((read & vars(part).keys()) - {"training"} for part in others):
        return None
    return constants


@contextmanager
def _only_straight_code(read: set[str]) -> Iterator[None]:
    """Stop at the first function of the user's that is not a straight line, before it runs.

    Args:
        read: gets the names of the attributes that the user's functions mention.
    """
    if sys.getprofile() is not None:
        raise RuntimeError("a profiler is at work")

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_CONTEXTS):
            raise RuntimeError(f"{module} changes how the code around it runs")
        if module.partition(".")[0] not in _LIBRARIES and not module.startswith(_OURS):
            names = _straight(frame.f_code)
            if names is None:
                raise RuntimeError(f"{frame.f_code.co_qualname} is not a straight line")
            read.update(names)

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


_LIBRARIES = {"torch", *sys.stdlib_module_names} - {"__main__"}
# This file, and the code that Python generates for named tuples.
_OURS = (__name__, "namedtuple_")


@lru_cache(maxsize=1024)
def _straight(code: CodeType) -> frozenset[str] | None:
    """The names of attributes that a function reads; None if it is not a straight line."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    if not _is_straight(function.body):
        return None
    nodes = list(ast.walk(function))
    if any(isinstance(node, _BRANCHES) for node in nodes):
        return None
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))


def _is_straight(body: list[ast.stmt]) -> bool:
    return all(
        (isinstance(line, _STATEMENTS) and _assigns_names_only(line))
        or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in body
    )


def _assigns_names_only(line: ast.stmt) -> bool:
    if isinstance(line, ast.For):
        return not line.orelse and _are_names([line.target]) and _is_straight(line.body)
    if isinstance(line, ast.Assign):
        return _are_names(line.targets)
    if isinstance(line, (ast.AnnAssign, ast.AugAssign)):
        return _are_names([line.target])
    return True


def _are_names(targets: list[ast.expr]) -> bool:
    return all(
        isinstance(t, ast.Name) or (isinstance(t, ast.Tuple) and _are_names(t.elts))
        for t in targets
    )
