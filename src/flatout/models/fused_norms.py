"""BatchNorm in training, with the ReLU after it, as one operator: fewer passes over memory.

In a `forward` that can be traced as a graph, pairs of BatchNorm and ReLU or ReLU6, with a residual
block's sum between them, become one call. The same kernel also runs every other BatchNorm. It adds
sums in another order than torch, so results are equal except for rounding. Modules, their names and
the state dict stay as they are.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules import module as every_module

from flatout.models import batch_norm
from flatout.models.rewrites import RELUS, Rewrite, graph_rewrite, is_fresh, kind_of
from flatout.models.trace import Traced, add_in_place, is_watched, trace

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_RELU6S = (nn.ReLU6, F.relu6)
_SUMS = (operator.add, torch.add, add_in_place)


def fused_norms_of(model: nn.Module) -> list[Rewrite]:
    """Return the rewrites that would fuse parts of `model` in training. Changes nothing."""
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return []
    rewrites: list[Rewrite] = []
    done: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in done or not module.training or not _has_norms(module):
            continue
        traced = _traced(module)
        fused = [] if traced is None else _fuse(traced.graph, module)
        if traced is not None and fused:
            done.update(traced.inlined)
            done.update(fused)
            where = name or type(module).__name__
            words = f"{len(fused)} BatchNorm in {where} with the activation behind"
            rewrites.append(graph_rewrite(words, module, traced))
    alone = [m for m in model.modules() if m not in done and _is_norm(m)]
    if alone:
        words = f"{len(alone)} BatchNorm by Flatout's kernel"
        rewrites.append(Rewrite(words, partial(_by_kernel, alone)))
    return rewrites


def _by_kernel(norms: list[nn.Module]) -> Callable[[], None]:
    for norm in norms:
        norm.forward = MethodType(batch_norm.forward, norm)

    def undo() -> None:
        for norm in norms:
            del norm.forward

    return undo


def _has_norms(module: nn.Module) -> bool:
    return any(_is_norm(part) for part in module.modules() if part is not module)


def _is_norm(module: nn.Module) -> bool:
    return type(module) in _NORMS and module.training and not is_watched(module)


def _traced(module: nn.Module) -> Traced | None:
    rewritten = getattr(vars(module).get("forward"), "traced", None)
    if rewritten is None:
        return trace(module)
    graph = copy.deepcopy(rewritten.graph)
    return Traced(graph, rewritten.constants, rewritten.inlined)


def _fuse(graph: fx.Graph, module: nn.Module) -> list[nn.Module]:
    """Join each BatchNorm with the activation that is its only reader; return the BatchNorms."""
    fused = []
    for node in list(graph.nodes):
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs or len(node.users) != 1:
            continue
        norm = module.get_submodule(str(node.target))
        if not _is_norm(norm):
            continue
        (reader,) = node.users
        total = reader if _is_residual(reader, node, module) else None
        if total is not None:
            (reader,) = total.users
        activation = _activation(reader, module)
        if activation is None or (total is not None and activation == "relu6"):
            continue
        # Nothing else reads the activation's input, so the activation may run where its input is
        # made.
        place = node if total is None else total
        with graph.inserting_before(place):
            skip = None if total is None else next(n for n in total.args if n is not node)
            is_module = reader.op == "call_module"
            call = graph.call_function(
                batch_norm.norm_and_activation,
                (
                    node.args[0],
                    graph.get_attr(str(node.target)),
                    skip,
                    activation,
                    graph.get_attr(str(reader.target)) if is_module else None,
                ),
            )
        reader.replace_all_uses_with(call)
        for old in (reader, total, node):
            if old is not None:
                graph.erase_node(old)
        fused.append(norm)
    graph.lint()
    return fused


def _activation(node: fx.Node, module: nn.Module) -> str | None:
    if len(node.all_input_nodes) != 1 or not node.args or node.args[0] not in node.all_input_nodes:
        return None
    if node.op == "call_module" and is_watched(module.get_submodule(str(node.target))):
        return None
    kind: Any = kind_of(node, module)
    return "relu" if kind in RELUS else "relu6" if kind in _RELU6S else None


def _is_residual(node: fx.Node, norm: fx.Node, module: nn.Module) -> bool:
    if node.op != "call_function" or node.target not in _SUMS or node.kwargs:
        return False
    if len(node.args) != 2 or len(node.all_input_nodes) != 2 or len(node.users) != 1:
        return False
    if node.target is add_in_place and node.args[0] is not norm:
        return False
    (source,) = norm.all_input_nodes
    return len(source.users) == 1 and is_fresh(source, module)
