"""The program of a written `forward` as a graph, if the graph is certain to be the same program.

torch.fx runs `forward` once on proxies for tensors and records the operations on them. It does not
record anything else, such as a branch, an entered context, or an element appended to a list. So the
source code is checked first, and a forward is run on proxies only if it contains nothing of this
kind. It must be a straight line of assignments that ends in a return, and may call only torch, a
submodule, or a method of the same kind. Plain attributes that it reads become constants of the
graph. These constants are returned too, so that a call can check whether the attributes have
changed.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import operator
import pickle
import sys
import textwrap
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from flatout.data import random_state, set_random_state

_PLAIN = (bool, int, float, str, type(None))
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.Return)
# Expressions that run a part of the code only sometimes or later, or that contain assignments.
_NOT_STRAIGHT = (
    ast.IfExp,
    ast.BoolOp,
    ast.Lambda,
    ast.comprehension,
    ast.NamedExpr,
    ast.Await,
    ast.Yield,
    ast.YieldFrom,
    ast.Starred,
)
_LIBRARIES = (torch, F, torch.special, torch.linalg, torch.fft, math, operator)
_PURE = (range, len, zip, enumerate, reversed, int, float, tuple, list, min, max, sum)


_LINE = "flatout_line"


def add_in_place(a: Any, b: Any) -> Any:
    """Run `a += b` in place, as Python does. torch.fx would record `a + b`."""
    a += b
    return a


class _Proxy(fx.Proxy):
    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", add_in_place, (self, other), {})


@dataclass(frozen=True)
class Traced:
    """A module's forward as a graph.

    Attributes:
        graph: calls every submodule as a module, except for the plain Sequentials in `inlined`.
        constants: plain attributes of the module that the graph holds as constants.
        inlined: Sequentials whose members the graph calls one by one.
    """

    graph: fx.Graph
    constants: dict[str, Any]
    inlined: list[nn.Module]


def trace(module: nn.Module, *, with_lines: bool = False) -> Traced | None:
    """Return the graph of `module.forward`, or None if the graph might not be the same program."""
    forward = type(module).forward
    if "forward" in vars(module) or not isinstance(forward, FunctionType):
        return None
    if not _takes_all(forward):
        return None
    attributes, before = set(vars(module)), random_state()
    tracer = _Tracer(forward.__code__ if with_lines else None)
    try:
        constants = _read(forward, module)
        graph = tracer.trace(module)
    except Exception:
        return None
    finally:
        # torch.fx adds tensors that it found to the module's attributes.
        met = [vars(module).pop(name) for name in vars(module).keys() - attributes]
        drew = not _same(random_state(), before)
        set_random_state(before)
    return None if met or drew else Traced(graph, constants, tracer.inlined)


def line_of(node: fx.Node) -> tuple[str, int]:
    """Return file and line of the written `forward` that made a node; "" and 0 in a Sequential."""
    file, line = node.meta.get(_LINE, ("", 0))
    return str(file), int(line)


def is_watched(module: nn.Module) -> bool:
    """Return whether the module has hooks or a replaced forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )


class _Tracer(fx.Tracer):
    """Traces into plain Sequentials; every other module stays a module."""

    def __init__(self, lines_of: CodeType | None) -> None:
        super().__init__()
        self._lines_of = lines_of if lines_of is not nn.Sequential.forward.__code__ else None
        # Otherwise forward would write into the buffers themselves.
        self.proxy_buffer_attributes = True
        self.inlined: list[nn.Module] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        frame = sys._getframe() if self._lines_of else None
        while frame is not None and frame.f_code is not self._lines_of:
            frame = frame.f_back
        if frame is not None:
            node.meta[_LINE] = (frame.f_code.co_filename, frame.f_lineno)
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m) is not nn.Sequential or is_watched(m):
            return True
        self.inlined.append(m)
        return False


def _takes_all(forward: FunctionType) -> bool:
    return all(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(forward).parameters.values()
    )


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    others = ("python", "numpy")
    return torch.equal(a["torch"], b["torch"]) and all(
        pickle.dumps(a[name]) == pickle.dumps(b[name]) for name in others
    )


# -- reading the source ----------------------------------------------------------------------------


class _Unsure(Exception):
    """Raised if a graph of this function might not be the same program."""


def _read(function: FunctionType, module: nn.Module) -> dict[str, Any]:
    if function.__code__ is nn.Sequential.forward.__code__:
        return {}
    source = _Source(function, module)
    constants: dict[str, Any] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            constants |= source.constant(node)
        elif isinstance(node, ast.Assign) and isinstance(source.value(node.value), nn.Module):
            raise _Unsure("a module under a local name")
        elif isinstance(node, ast.Call):
            method = source.method(node.func)
            if method is not None:
                constants |= _read(method, module)
    return constants


class _Source:
    """The source of a straight-line function, and the objects that its names refer to."""

    def __init__(self, function: FunctionType, module: nn.Module) -> None:
        self.tree = _parsed(function.__code__)
        self.module = module
        self.me = function.__code__.co_varnames[0]
        self.locals = set(function.__code__.co_varnames) - {self.me}
        closure = inspect.getclosurevars(function).nonlocals
        self.globals = ChainMap(dict(closure), function.__globals__, vars(builtins))
        self.layers = set(self._loops_over_modules())

    def _loops_over_modules(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.For) and isinstance(self.value(node.iter), nn.Module):
                assert isinstance(node.target, ast.Name)
                yield node.target.id

    def value(self, expression: ast.expr) -> Any:
        if isinstance(expression, ast.Name):
            if expression.id == self.me:
                return self.module
            return _LOCAL if expression.id in self.locals else self.globals[expression.id]
        if not isinstance(expression, ast.Attribute):
            return _LOCAL
        owner, name = self.value(expression.value), expression.attr
        if owner is _LOCAL:
            return _LOCAL
        if isinstance(owner, nn.Module) and isinstance(
            inspect.getattr_static(owner, name, None), property
        ):
            raise _Unsure("a property runs code")
        result = getattr(owner, name)
        return _LOCAL if isinstance(result, torch.Tensor) else result

    def constant(self, node: ast.Attribute) -> dict[str, Any]:
        owner = self.value(node.value)
        self.value(node)  # raises if it is more than an attribute
        if not isinstance(owner, nn.Module) or node.attr not in vars(owner):
            return {}
        value = vars(owner)[node.attr]
        if owner is not self.module or not isinstance(value, _PLAIN):
            raise _Unsure("an attribute that cannot be watched")
        return {node.attr: value}

    def method(self, called: ast.expr) -> FunctionType | None:
        if isinstance(called, ast.Subscript) and isinstance(self.value(called.value), nn.Module):
            return None
        value = self.value(called)
        if value is _LOCAL:
            # A method of a tensor, or a layer of the list that the loop runs over.
            if isinstance(called, ast.Attribute):
                return None
            if isinstance(called, ast.Name) and called.id in self.layers:
                return None
            raise _Unsure("a call of a local value")
        if isinstance(value, nn.Module) or _is_pure(value):
            return None
        if isinstance(value, MethodType) and value.__self__ is self.module:
            function = value.__func__
            if isinstance(function, FunctionType) and function is not nn.Module.__call__:
                return function
        raise _Unsure(f"a call of {value}")


_LOCAL = object()


def _is_pure(function: Any) -> bool:
    name = getattr(function, "__name__", None)
    return any(function is pure for pure in _PURE) or any(
        isinstance(name, str) and vars(library).get(name) is function for library in _LIBRARIES
    )


@lru_cache(maxsize=1024)
def _parsed(code: CodeType) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or not _is_straight(tree.body):
        raise _Unsure("not a straight line")
    if any(isinstance(node, _NOT_STRAIGHT) for node in ast.walk(tree)):
        raise _Unsure("a part that runs only sometimes")
    augmented = [node.op for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
    if not all(isinstance(op, ast.Add) for op in augmented):
        raise _Unsure("torch.fx makes a new tensor where this writes into one")
    return tree


def _is_straight(body: list[ast.stmt]) -> bool:
    return all(
        (isinstance(line, _STATEMENTS) and _assigns_names_only(line))
        or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in body
    )


def _assigns_names_only(line: ast.stmt) -> bool:
    if isinstance(line, ast.For):
        return isinstance(line.target, ast.Name) and not line.orelse and _is_straight(line.body)
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
