"""Exact rewrites: the same values and gradients with less memory traffic.

The only rewrite changes an activation that only clamps (ReLU, ReLU6), followed by max-pooling. The
maximum of clamped values is the clamped maximum. Pooling first thus leaves the activation a quarter
of the elements. The most frequent pair, ReLU and 2x2 windows, is computed in a single pass over
memory.

In backward the pool sends the gradient to the first largest element of a window. That element
differs between the two orders only if all candidates are clamped, and then the gradient is zero in
both. So values and gradients are equal bit for bit, except for the sign of a zero where the input
has negative zeros, which no sum can show.

A `forward`, also of a Sequential, is traced as a graph. In training, the graph with the pairs
exchanged runs in its place. A pair is not rewritten if its modules have hooks, or if its
intermediate value has another reader. Submodules, their names and the state dict stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules import module as every_module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from flatout.models.relu_pool import relu_pool
from flatout.models.trace import Traced, is_watched, line_of, trace

_ACTIVATIONS = (nn.ReLU, nn.ReLU6)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
RELUS = (nn.ReLU, F.relu, torch.relu, F.relu_, torch.relu_, "relu", "relu_")
_ACTIVATION_METHODS = ("relu", "relu_")
_ACTIVATION_FUNCTIONS = (F.relu, torch.relu, F.relu_, torch.relu_, F.relu6)
_POOL_FUNCTIONS = (
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    torch.max_pool1d,
    torch.max_pool2d,
    torch.max_pool3d,
)
# Modules and functions that only read their input, and return a new tensor that nothing else holds.
_FRESH_MODULES = (_ConvNd, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.Linear, *_POOLS)
_FRESH_FUNCTIONS = (
    *_POOL_FUNCTIONS,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.linear,
    F.batch_norm,
    F.group_norm,
    F.layer_norm,
    torch.add,
    torch.sub,
    torch.mul,
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
)


@dataclass(frozen=True)
class Rewrite:
    """A change that was found but is not made yet.

    Attributes:
        words: a description of the change.
        apply: makes the change, and returns a function that undoes it.
    """

    words: str
    apply: Callable[[], Callable[[], None]]


def rewrites_of(model: nn.Module) -> list[Rewrite]:
    """Return the rewrites that fit `model` in training. Changes nothing."""
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return []
    rewrites: list[Rewrite] = []
    done: set[nn.Module] = set()
    for name, module, traced in _traced_with_pools(model, done):
        pairs = _exchange(traced.graph, module)
        if pairs:
            done.update(traced.inlined)
            where = name or type(module).__name__
            words = f"{pairs} activation(s) in {where} moved after max-pooling"
            rewrites.append(graph_rewrite(words, module, traced))
    return rewrites


def _traced_with_pools(
    model: nn.Module, done: Container[nn.Module], *, with_lines: bool = False
) -> Iterator[tuple[str, nn.Module, Traced]]:
    for name, module in model.named_modules():
        if module not in done and module.training and _may_pool(module):
            traced = trace(module, with_lines=with_lines)
            if traced is not None:
                yield name, module, traced


@dataclass(frozen=True)
class Pair:
    """An activation that could run after max-pooling.

    Attributes:
        activation, pooling: names of the modules in the model, or of the functions.
        modules: names of the modules whose own time includes both: the two modules themselves, or
            the module whose forward calls a function.
        file, line: the place of the pooling in a written `forward`; "" and 0 in a Sequential.
    """

    activation: str
    pooling: str
    modules: tuple[str, str]
    file: str
    line: int


def find_pairs(model: nn.Module) -> list[Pair]:
    """Return the pairs that `rewrites_of` would exchange in a torch module, with their places."""
    pairs: list[Pair] = []
    done: set[nn.Module] = set()
    for name, module, traced in _traced_with_pools(model, done, with_lines=True):
        own = [
            _pair(name, node.args[0], node)
            for node in traced.graph.nodes
            if _is_pool(node, module)
            and isinstance(node.args[0], fx.Node)
            and _is_movable(node.args[0], module)
        ]
        if own:
            done.update(traced.inlined)
        pairs += own
    return pairs


def _pair(name: str, activation: fx.Node, pooling: fx.Node) -> Pair:
    words = _words(name, activation), _words(name, pooling)
    modules = (
        words[0] if activation.op == "call_module" else name,
        words[1] if pooling.op == "call_module" else name,
    )
    return Pair(*words, modules, *line_of(pooling))


def _words(prefix: str, node: fx.Node) -> str:
    if node.op == "call_module":
        return f"{prefix}.{node.target}".removeprefix(".")
    return str(getattr(node.target, "__name__", node.target))


def _may_pool(module: nn.Module) -> bool:
    if not any(True for _ in module.children()):
        return False
    own = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    functions = [f for cls in own for f in vars(cls).values() if isinstance(f, FunctionType)]
    return any("max_pool" in name for f in functions for name in f.__code__.co_names) or any(
        type(part) in _POOLS for part in module.modules()
    )


def graph_rewrite(words: str, module: nn.Module, traced: Traced) -> Rewrite:
    """Return the rewrite that runs a changed graph of a module's forward."""
    forward = _in_training(type(fx.GraphModule(module, traced.graph)).forward, module, traced)

    def apply() -> Callable[[], None]:
        before = vars(module).get("forward")
        module.forward = MethodType(forward, module)

        def undo() -> None:
            if before is None:
                del module.forward
            else:
                module.forward = before

        return undo

    return Rewrite(words, apply)


def _in_training(
    rewritten: Callable[..., Any], module: nn.Module, traced: Traced
) -> Callable[..., Any]:
    # Runs `rewritten` unless the result could differ. Further rewrites read `traced`.
    as_written = type(module).forward
    constants = {**traced.constants, "training": True}

    # The name `forward` lets a pickled model find the forward of its class again.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        for name, value in constants.items():
            if own.get(name) != value:
                return as_written(self, *args, **kwargs)
        return as_written(self, *args, **kwargs) if kwargs else rewritten(self, *args)

    forward.traced = traced  # type: ignore[attr-defined]
    return forward


def _exchange(graph: fx.Graph, module: nn.Module) -> int:
    pairs = 0
    for pool in list(graph.nodes):
        if not _is_pool(pool, module):
            continue
        activation = pool.args[0]
        if not isinstance(activation, fx.Node) or not _is_movable(activation, module):
            continue
        # Both operators run at the activation's place in the graph: later the source tensor might
        # hold other values.
        with graph.inserting_before(activation):
            pool.replace_all_uses_with(_exchanged(graph, module, activation, pool))
        graph.erase_node(pool)
        graph.erase_node(activation)
        pairs += 1
    graph.lint()
    return pairs


def _exchanged(graph: fx.Graph, module: nn.Module, activation: fx.Node, pool: fx.Node) -> fx.Node:
    (source,) = activation.all_input_nodes
    is_written = not all(is_fresh(reader, module) for reader in pool.users)
    if _is_two_by_two(pool, module) and kind_of(activation, module) in RELUS:
        parts = [
            graph.get_attr(str(node.target)) if node.op == "call_module" else None
            for node in (pool, activation)
        ]
        return graph.call_function(relu_pool, (source, *parts, is_written))
    pooled = graph.node_copy(pool, {activation: source}.__getitem__)
    if is_written:
        return graph.create_node("call_function", *_unsaved(activation, module, pooled))
    return graph.node_copy(activation, {source: pooled}.__getitem__)


def _unsaved(activation: fx.Node, module: nn.Module, pooled: fx.Node) -> tuple[Any, Any]:
    if kind_of(activation, module) in (nn.ReLU6, F.relu6):
        return F.relu6, (pooled,)
    return F.threshold, (pooled, 0.0, 0.0)


def kind_of(node: fx.Node, module: nn.Module) -> Any:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target)))
    return node.target


def _is_pool(node: fx.Node, module: nn.Module) -> bool:
    if len(node.all_input_nodes) != 1 or not node.args:
        return False
    if node.op == "call_module":
        pool = module.get_submodule(str(node.target))
        if type(pool) not in _POOLS or is_watched(pool):
            return False
    elif node.op != "call_function" or node.target not in _POOL_FUNCTIONS:
        return False
    options = _pool_options(node, module)
    return not options.get("return_indices") and _sees_data(
        options.get("padding", 0), options.get("dilation", 1)
    )


def _is_two_by_two(node: fx.Node, module: nn.Module) -> bool:
    if kind_of(node, module) not in (nn.MaxPool2d, F.max_pool2d, torch.max_pool2d):
        return False
    options = _pool_options(node, module)
    return (
        set(_numbers(options.get("kernel_size"))) == {2}
        and set(_numbers(options.get("stride"))) <= {2, None}
        and set(_numbers(options.get("padding", 0))) == {0}
        and set(_numbers(options.get("dilation", 1))) == {1}
        and not options.get("ceil_mode")
    )


def _pool_options(node: fx.Node, module: nn.Module) -> dict[str, Any]:
    if node.op == "call_module":
        pool = module.get_submodule(str(node.target))
        return {name: getattr(pool, name) for name in _POOL_OPTIONS}
    return dict(zip(_POOL_OPTIONS, node.args[1:], strict=False)) | node.kwargs


_POOL_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


def _sees_data(padding: Any, dilation: Any) -> bool:
    return not any(_numbers(padding)) or all(d == 1 for d in _numbers(dilation))


def _numbers(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _is_movable(node: fx.Node, module: nn.Module) -> bool:
    if not node.args or len(node.all_input_nodes) != 1 or len(node.users) != 1:
        return False
    if node.op == "call_module":
        activation = module.get_submodule(str(node.target))
        if type(activation) not in _ACTIVATIONS or is_watched(activation):
            return False
    elif node.op == "call_method":
        if node.target not in _ACTIVATION_METHODS:
            return False
    elif node.op != "call_function" or node.target not in _ACTIVATION_FUNCTIONS:
        return False
    source = node.all_input_nodes[0]
    return len(source.users) == 1 and is_fresh(source, module)


def is_fresh(node: fx.Node, module: nn.Module) -> bool:
    """Return whether a node only reads its input, and returns a tensor that nothing else holds."""
    if node.op == "call_module":
        source = module.get_submodule(str(node.target))
        is_torchs = type(source).__module__.startswith("torch.") and not is_watched(source)
        return is_torchs and isinstance(source, _FRESH_MODULES)
    return node.op == "call_function" and node.target in _FRESH_FUNCTIONS


def forward_as_written(module: Any) -> Callable[..., Any] | None:
    """Return the forward of a module's class if a Flatout rewrite is on the module, else None.

    A rewrite calls submodules in another order, and only in training. A module with a cut inside
    (models/frozen) runs its original forward, so that rewrites do not move the cut.
    """
    return (
        MethodType(type(module).forward, module) if is_ours(vars(module).get("forward")) else None
    )


def is_ours(forward: Any) -> bool:
    """Return whether a module's own forward is a rewrite, or redirects its calls to a run."""
    return str(getattr(forward, "__module__", "")).startswith("flatout.models.")
