"""Exact rewrites: the same values and gradients with less memory traffic.

One rewrite is known: an activation that only clamps (ReLU, ReLU6) followed by max-pooling. The
maximum of clamped values is the clamped maximum, so pooling first leaves the activation a quarter
of the elements. In backward the pool sends the gradient to the first largest element of a window;
that element differs between the two orders only where all candidates are clamped, and there the
gradient is zero in both. So values and gradients are equal bit for bit (tested in fp32 and bf16).

It is done in `nn.Sequential` by exchanging the two neighbours (names in the state dict stay:
neither has any), and in a written `forward` by tracing it with torch.fx and putting the exchanged
code in its place for training. Nothing is rewritten that is hooked, or whose intermediate value
something else reads.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

_ACTIVATIONS = (nn.ReLU, nn.ReLU6)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_ACTIVATION_FUNCTIONS = (F.relu, torch.relu, F.relu_, torch.relu_, F.relu6)
_POOL_FUNCTIONS = (
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    torch.max_pool1d,
    torch.max_pool2d,
    torch.max_pool3d,
)


@dataclass(frozen=True)
class Rewrite:
    """A change that is found but not yet made.

    Attributes:
        words: what it changes, for people.
        apply: makes the change and returns what undoes it.
    """

    words: str
    apply: Callable[[], Callable[[], None]]


def find_rewrites(model: nn.Module) -> list[Rewrite]:
    """The exact rewrites that fit `model`. Looks only; changes nothing."""
    found = [
        _exchange(name, parent, first, second)
        for name, parent in model.named_modules()
        if type(parent) is nn.Sequential
        for first, second in _neighbours(parent)
    ]
    # The traced code contains the Sequentials too, so it is used only where it finds more.
    return _in_forward(model, more_than=len(found)) or found


def _neighbours(parent: nn.Sequential) -> list[tuple[str, str]]:
    names = list(parent._modules)
    modules = list(parent._modules.values())
    return [
        (names[i], names[i + 1])
        for i in range(len(names) - 1)
        if type(modules[i]) in _ACTIVATIONS
        and _is_plain_pool(modules[i + 1])
        and not _hooked(modules[i])
        and not _hooked(modules[i + 1])
        and _may_move(modules[i], modules[i - 1] if i else None)
    ]


def _may_move(activation: nn.Module | None, before: nn.Module | None) -> bool:
    """An in-place activation may move only if nobody else can hold the tensor it overwrites."""
    if not getattr(activation, "inplace", False):
        return True
    return isinstance(before, (_ConvNd, _BatchNorm)) and not _hooked(before)


def _is_plain_pool(module: nn.Module | None) -> bool:
    return type(module) in _POOLS and not module.return_indices  # type: ignore[union-attr]


def _hooked(module: nn.Module | None) -> bool:
    return module is None or bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _exchange(name: str, parent: nn.Sequential, first: str, second: str) -> Rewrite:
    def swap() -> None:
        modules = parent._modules
        modules[first], modules[second] = modules[second], modules[first]

    def apply() -> Callable[[], None]:
        swap()
        return swap

    where = f"{name}.{first}" if name else first
    return Rewrite(f"activation {where} moved behind max-pooling", apply)


def _in_forward(model: nn.Module, more_than: int) -> list[Rewrite]:
    """The same exchange inside the model's own written `forward`, if that finds more pairs."""
    if "forward" in model.__dict__ or type(model) is nn.Sequential or not model.training:
        return []
    graph = _traced(model)
    pairs = _exchange_in_graph(graph, model) if graph else 0
    if graph is None or pairs <= more_than:
        return []
    forward = type(fx.GraphModule(model, graph)).forward
    original = type(model).forward

    def switched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Tracing froze what depends on the mode; evaluation runs the code as written.
        return (forward if self.training else original)(self, *args, **kwargs)

    def undo() -> None:
        del model.forward

    def apply() -> Callable[[], None]:
        model.forward = MethodType(switched, model)
        return undo

    where = f"{type(model).__name__}.forward"
    return [Rewrite(f"{pairs} activation(s) in {where} moved behind max-pooling", apply)]


def _traced(model: nn.Module) -> fx.Graph | None:
    """The graph of `model.forward`, or None where tracing would not give the same program."""
    before = {m: dict(m.__dict__) for m in model.modules()}
    python_random = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            graph = fx.Tracer().trace(model)
    except Exception:
        return None  # control flow on values and the like: the model stays as written
    finally:
        random.setstate(python_random)
        writes = _restore(before)
    constants = any("_tensor_constant" in str(n.target) for n in graph.nodes)
    return None if writes or constants else graph


def _restore(before: dict[nn.Module, dict[str, Any]]) -> bool:
    """Put back what running `forward` wrote into its modules; returns whether it wrote anything."""
    wrote = False
    for module, attributes in before.items():
        now = module.__dict__
        if now.keys() != attributes.keys() or any(now[k] is not v for k, v in attributes.items()):
            wrote = True
            now.clear()
            now.update(attributes)
    return wrote


def _exchange_in_graph(graph: fx.Graph, model: nn.Module) -> int:
    """Exchange each activation -> pool pair of `graph`; returns how many."""
    pairs = 0
    for pool in list(graph.nodes):
        if not _is_pool_node(pool, model):
            continue
        activation = pool.args[0]
        if not isinstance(activation, fx.Node) or not _is_activation_node(activation, model):
            continue
        source = activation.args[0]
        # A second reader of the source would see what an in-place activation wrote there.
        if not isinstance(source, fx.Node) or source.op == "placeholder":
            continue
        if len(activation.users) != 1 or len(source.users) != 1:
            continue
        users = list(pool.users)
        pool.replace_input_with(activation, source)
        with graph.inserting_after(pool):
            moved = graph.node_copy(activation)
        moved.replace_input_with(source, pool)
        for user in users:
            user.replace_input_with(pool, moved)
        graph.erase_node(activation)
        pairs += 1
    graph.lint()
    return pairs


def _is_activation_node(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return type(module) in _ACTIVATIONS and not _hooked(module)
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return node.op == "call_function" and node.target in _ACTIVATION_FUNCTIONS


def _is_pool_node(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return _is_plain_pool(module) and not _hooked(module)
    return (
        node.op == "call_function"
        and node.target in _POOL_FUNCTIONS
        and not node.kwargs.get("return_indices")
        and bool(node.args)
        # One output that is not taken apart again.
        and not any(u.target is operator.getitem for u in node.users)
    )
