"""A model's forward as one sequence of calls, which can be cut between two calls.

The graph comes from `models/trace.py`, which makes one only if it is certain to be the same
program. It contains the calls within the user's modules whose forward is a straight line. torch's
layers are called as they are, so that their modes, hooks and in-place code stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from flatout.errors import ModelError
from flatout.models.trace import is_watched, trace

Stage = tuple[int, int]
"""The range of a stage's calls."""


class Chain:
    """The calls of a model's forward, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # By module, the plain attributes that the graph holds as constants.
        self._constants: list[tuple[nn.Module, dict[str, Any]]] = []
        self.graph = fx.Graph()
        traced = None if is_watched(model) else trace(model)
        if traced is None or "training" in traced.constants:
            raise _not_straight(model, "is not" if traced is None else "reads self.training")
        self._constants.append((model, traced.constants))
        given: dict[fx.Node, Any] = {
            node: self.graph.placeholder(str(node.target)) for node in _inputs_of(traced.graph)
        }
        self.inputs = list(given.values())
        self._output = self._put(traced.graph, "", given)
        self.graph.output(self._output)
        self.calls = [node for node in self.graph.nodes if node.op.startswith("call")]
        self._place = {node: place for place, node in enumerate(self.calls)}
        self._last = self._last_uses()

    def _put(self, graph: fx.Graph, prefix: str, known: dict[fx.Node, Any]) -> Any:
        for node in graph.nodes:
            if node.op == "output":
                return map_arg(node.args[0], known.__getitem__)
            if node.op == "placeholder":
                continue
            inner = self._within(f"{prefix}{node.target}", node)
            if inner is not None:
                args = map_arg(node.args, known.__getitem__)
                own = dict(zip(_inputs_of(inner), args, strict=True))
                known[node] = self._put(inner, f"{prefix}{node.target}.", own)
                continue
            copy = self.graph.node_copy(node, known.__getitem__)
            if node.op in ("call_module", "get_attr"):
                copy.target = f"{prefix}{node.target}"
            known[node] = copy
        raise AssertionError("a graph without an output")

    def _within(self, path: str, node: fx.Node) -> fx.Graph | None:
        if node.op != "call_module" or node.kwargs:
            return None
        module = self.model.get_submodule(path)
        if type(module).__module__.startswith("torch.nn") or is_watched(module):
            return None
        traced = trace(module) if any(module.children()) else None
        if traced is None or "training" in traced.constants:
            return None
        if len(_inputs_of(traced.graph)) != len(node.args):
            return None
        self._constants.append((module, traced.constants))
        return traced.graph

    def _last_uses(self) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}
        for place, call in enumerate(self.calls):
            last.update(dict.fromkeys(call.all_input_nodes, place))
        last.update(dict.fromkeys(self._given_out(), len(self.calls)))
        return last

    def _given_out(self) -> list[fx.Node]:
        result: dict[fx.Node, None] = {}
        map_arg(self._output, lambda node: result.setdefault(node))
        return list(result)

    def check_constants(self) -> None:
        """Refuse to continue if an attribute of a module differs from the graph's constant."""
        for module, constants in self._constants:
            for name, value in constants.items():
                if vars(module).get(name) != value:
                    raise ModelError(
                        f"{type(module).__name__}.{name} was {value!r} when the model was cut into "
                        f"stages, and is {vars(module).get(name)!r} now",
                        do="keep what changes in a buffer, or train with world.strategy=ddp",
                    )

    # -- values and weights by place -------------------------------------------------------------

    def crossing(self, cut: int) -> list[fx.Node]:
        """Return values made before a cut and read after it. Weights belong to their readers."""
        made = [*self.inputs, *self.calls[:cut]]
        return [value for value in made if self._last.get(value, -1) >= cut]

    def spans(self) -> Iterator[tuple[str, int, int]]:
        spans: dict[int, tuple[str, int, int]] = {}
        for place, call in enumerate(self.calls):
            for name, tensor in self.weights_read(call):
                known, first, _ = spans.get(id(tensor), (name, place, place))
                spans[id(tensor)] = (known, first, place)
        yield from spans.values()

    def weights_read(self, call: fx.Node) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and tensors of the parameters and layers' buffers that a call reads."""
        if call.op == "call_module":
            module = self.model.get_submodule(str(call.target))
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                yield f"{call.target}.{name}", tensor
        for node in call.all_input_nodes:
            if node.op == "get_attr":
                path, _, name = str(node.target).rpartition(".")
                tensor = getattr(self.model.get_submodule(path), name)
                if isinstance(tensor, nn.Parameter):
                    yield str(node.target), tensor

    def between(self, value: fx.Node, by: fx.Node) -> range:
        return range(self._place.get(value, -1) + 1, self._place[by] + 1)

    # -- stages --------------------------------------------------------------------------------

    def stage(self, stage: Stage) -> fx.Graph:
        """Return the graph of a stage, which takes and returns tuples of the values at its cuts."""
        first, stop = stage
        graph, known = fx.Graph(), {}
        for value in self.inputs if first == 0 else self.crossing(first):
            known[value] = graph.placeholder(value.name)

        def at(node: fx.Node) -> fx.Node:
            if node not in known:
                known[node] = graph.node_copy(node)  # a weight
            return known[node]

        for call in self.calls[first:stop]:
            known[call] = graph.node_copy(call, at)
        is_last = stop == len(self.calls)
        gives = self._given_out() if is_last else self.crossing(stop)
        graph.output(tuple(at(value) for value in gives))
        return graph

    def put_together(self, values: Sequence[torch.Tensor]) -> Any:
        """Return the model's output, made of the tensors that the last stage has returned."""
        known = dict(zip(self._given_out(), values, strict=True))
        return map_arg(self._output, known.__getitem__)

    def words(self, stage: Stage) -> str:
        """Return the names of a stage's layers, such as "features.0-6"."""
        paths = [str(c.target) for c in self.calls[slice(*stage)] if c.op == "call_module"]
        if not paths:
            return str(self.calls[stage[0]].name)
        first, last = paths[0], paths[-1]
        parent, _, name = last.rpartition(".")
        if first == last:
            return first
        return f"{first}-{name}" if first.rpartition(".")[0] == parent else f"{first}-{last}"


def _not_straight(model: nn.Module, why: str) -> ModelError:
    code = getattr(type(model).forward, "__code__", None)
    return ModelError(
        "world.strategy=staged cuts a forward that is a straight line of layers and functions of "
        f"torch, and that of {type(model).__name__} {'has hooks' if is_watched(model) else why}",
        where=f"{code.co_filename}, line {code.co_firstlineno}" if code else None,
        do="write it without branches, loops over numbers and default arguments, or as a "
        "torch.nn.Sequential; or train with world.strategy=ddp or fsdp",
    )


def _inputs_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]
