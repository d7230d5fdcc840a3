"""A whole step as one graph: forward, backward, clipping, the check for NaN, and the update.

The step is traced on fake tensors, so that tracing computes and draws nothing, and no code that
depends on values can be traced. The graph's inputs, some of which it changes in place, are:

    parameters, other parameters and buffers, the optimizer's state, the bad-step flag,
    the rates of each parameter group, the tensors of the batch
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from flatout.console import first_line
from flatout.data import Batch, map_tensors
from flatout.models import is_compiled
from flatout.optim import Kind, Update, kind_of
from flatout.train.compute import ModelCompute
from flatout.train.freezing_checks import ONLY_LOOKS
from flatout.train.graphs.capture_ids import Bounded
from flatout.train.losses.loss_value import mean_of_value
from flatout.train.losses.losses import Value
from flatout.train.settings import Switch

Tensors = list[torch.Tensor]
Shapes = list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
PLAIN_TYPES = (bool, int, float, str, bytes, type(None))
# Value of the bad-step flag if an id or label is out of range; the step has changed nothing else.
STRAY = 2.0
_HOOKS = tuple(
    name for name in vars(nn.Module()) if name.endswith("_hooks") and "state_dict" not in name
)


class Unfit(Exception):
    """Raised where a step cannot be one graph, with the reason."""


class Graph(NamedTuple):
    """A traced step or forward, as code of torch.fx.

    Attributes:
        code: source of a function `forward(self, *inputs)` that returns a list of tensors.
        constants: tensors that the function reads from `self`, by name.
        inputs: shape, strides and dtype of each input.
        reads_ids: whether the graph reports an id or label that is out of range: a step by
            flag 2, a forward by its first tensor.
        behind: the values returned after the first tensor (the loss, or a forward's report), with
            an ellipsis for each tensor.
        spec: tree structure of the values in `behind`.
        alike: names of parameters grouped by an equal number of steps, as from `Places.alike`;
            empty for a forward.
    """

    code: str
    constants: dict[str, torch.Tensor]
    inputs: Shapes
    reads_ids: bool
    behind: list[Any]
    spec: Any
    alike: list[list[str]]

    def restore(self, returned: Tensors) -> Any:
        """Return the values after the first tensor: a step's weight and output, or an output."""
        left = iter(returned)
        parts = [next(left) if part is ... else part for part in self.behind]
        return tree_unflatten(parts, self.spec)

    def digest(self, *facts: Any) -> str:
        """Return 24 hex digits that differ where the compiled code may differ."""
        parts = [
            self.code,
            self.inputs,
            facts,
            *((k, v.tolist()) for k, v in self.constants.items()),
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


class Places(NamedTuple):
    """The tensors that a step reads and changes, with their names.

    Attributes:
        parameters: parameters of the optimizer, by their names in the model.
        others: parameters that do not train, and buffers.
        groups: the optimizer's parameter groups: facts, and the names of parameters that train.
        states: optimizer state of each parameter in the order of `Kind.states`; empty before its
            first step.
        flag: the flag that a step with a NaN or infinity sets.
    """

    kind: Kind
    parameters: dict[str, torch.Tensor]
    others: dict[str, torch.Tensor]
    groups: list[tuple[dict[str, bool], list[str]]]
    states: dict[str, Tensors]
    flag: torch.Tensor

    def alike(self) -> list[list[str]]:
        """Return lists of parameters with the same parameter group and number of steps."""
        result: dict[tuple[int, float], list[str]] = {}
        for number, (facts, names) in enumerate(self.groups):
            counts = self.kind.states(facts)[:1] == ("step",)
            for name in names:
                state = self.states[name] if counts else []
                result.setdefault((number, float(state[0]) if state else 0.0), []).append(name)
        return list(result.values())

    def tensors(self) -> Tensors:
        """Return all tensors in the order of the graph's inputs."""
        states = [tensor for state in self.states.values() for tensor in state]
        return [*self.parameters.values(), *self.others.values(), *states, self.flag]

    def of(self, tensors: Sequence[torch.Tensor]) -> Places:
        """Return these `Places` with other tensors."""
        left = iter(tensors)
        return self._replace(
            parameters={name: next(left) for name in self.parameters},
            others={name: next(left) for name in self.others},
            states={name: [next(left) for _ in state] for name, state in self.states.items()},
            flag=next(left),
        )


def places_of(model: nn.Module, update: Update) -> Places:
    """Collect the tensors of a step, and refuse models and optimizers that cannot be captured."""
    check_model(model)
    kind = kind_of(update.parts[0].optimizer) if len(update.parts) == 1 else None
    if kind is None:
        kinds = " and ".join(type(part.optimizer).__name__ for part in update.parts)
        raise Unfit(f"the update of {kinds} cannot be captured; those of SGD, Adam and AdamW can")
    optimizer = update.parts[0].optimizer
    if update.parts[0].hooked():
        raise Unfit(f"{type(optimizer).__name__} has hooks, or its own step")
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    wanted = {p for p in names if p.requires_grad}
    if not wanted <= set(update.parameters) <= set(names) or update.flag is None:
        raise Unfit("the optimizer's parameters are not the trained parameters of the model")
    if {p.dtype for p in wanted} - {torch.float32, torch.float64} or update.flag.is_cuda:
        raise Unfit("parameters are not in float32 on the CPU")
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in wanted):
        raise Unfit("a parameter has hooks")
    groups: list[tuple[dict[str, bool], list[str]]] = []
    states: dict[str, Tensors] = {}
    for group in optimizer.param_groups:
        if any(map(torch.is_tensor, kind.rates(group))):
            raise Unfit("the optimizer's learning rate or another rate is a tensor")
        facts = kind.facts(group)
        training = [p for p in group["params"] if p in wanted]
        groups.append((facts, [names[p] for p in training]))
        for p in training:
            state = optimizer.state.get(p, {})
            values = [state.get(name) for name in kind.states(facts)]
            states[names[p]] = [] if any(value is None for value in values) else values
    parameters = {
        names[p]: p.detach()
        for group in optimizer.param_groups
        for p in group["params"]
        if p in wanted
    }
    frozen = {name: p.detach() for p, name in names.items() if name not in parameters}
    return Places(
        kind, parameters, {**frozen, **dict(model.named_buffers())}, groups, states, update.flag
    )


def check_model(model: nn.Module, *, compiled: bool = False) -> None:
    """Refuse a model whose code may have effects that its graph would lack."""
    before, after = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    if not all(hasattr(hook, ONLY_LOOKS) for hook in (*before.values(), *after.values())):
        raise Unfit("modules have hooks")
    for name, module in model.named_modules():
        which = f"{name or 'the model'} ({type(module).__name__})"
        if any(getattr(module, hooks) for hooks in _HOOKS):
            raise Unfit(f"{which} has hooks")
        if is_compiled(module) and not (compiled and module is model):
            raise Unfit(f"{which} is compiled already")
        if any(torch.is_tensor(value) for value in vars(module).values()):
            raise Unfit(f"{which} keeps a tensor that is neither a parameter nor a buffer")


class ModuleWatch:
    """Detects changes of the model that would change a traced step."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._hooks = [getattr(module, name) for module in modules for name in _HOOKS]
        self._known: list[tuple[dict[str, Any], str, Any]] = []
        for module in modules:
            own = vars(module)
            self._known += [(own, k, v) for k, v in own.items() if isinstance(v, PLAIN_TYPES)]
            self._known.append((own, "forward", own.get("forward")))
            # A cut after frozen layers sets this attribute. With another cut, the step is a
            # different one.
            self._known.append((own, "_call_impl", own.get("_call_impl")))
            for names in (module._modules, module._parameters, module._buffers):
                self._known += [(names, k, v) for k, v in names.items()]
        self._trains = [(p, p.requires_grad) for m in modules for p in m.parameters(recurse=False)]

    def holds(self) -> bool:
        """Return whether the model is unchanged."""
        if any(self._hooks):
            return False
        for names, key, value in self._known:
            now = names.get(key)
            if now is not value and (not isinstance(value, PLAIN_TYPES) or now != value):
                return False
        return all(parameter.requires_grad is trains for parameter, trains in self._trains)


class _Whole(nn.Module):
    """The loss as a module, so that the tensors of the inner model can be replaced."""

    def __init__(self, model: nn.Module, compute: ModelCompute) -> None:
        super().__init__()
        self.model, self._compute = model, compute

    def forward(self, batch: Batch) -> tuple[Value, Any]:
        return self._compute.traced(batch)


def trace(
    compute: ModelCompute, batch: Batch, places: Places, update: Update, switch: Switch
) -> Graph:
    """Trace the step on batches like this one, without changing anything."""
    whole, held, alike = _Whole(switch.model, compute), places.tensors(), places.alike()
    rates = [
        torch.tensor(places.kind.rates(group), dtype=torch.float64)
        for group in update.parts[0].optimizer.param_groups
    ]
    # The values returned after the loss, with an ellipsis in place of each tensor; and their spec.
    template: list[Any] = []
    strays: Tensors = []
    moved: Tensors = []

    def step(*flat: torch.Tensor) -> Tensors:
        now = places.of(flat[: len(held)])
        numbers = flat[len(held) : len(held) + len(rates)]
        left = iter(flat[len(held) + len(rates) :])
        inputs, targets, weights = map_tensors(lambda _: next(left), batch[:3])
        own = batch._replace(inputs=inputs, targets=targets, weight=weights, indices=None)
        with torch.enable_grad():
            trained = {name: p.detach().requires_grad_() for name, p in now.parameters.items()}
            tensors = {f"model.{name}": t for name, t in {**trained, **now.others}.items()}
            before = [(buffer, buffer.clone(), buffer._version) for buffer in now.others.values()]
            with switch.autocast(), Bounded() as bounded:
                value, output = torch.func.functional_call(whole, tensors, (own,))
            loss, weight = mean_of_value(value, batch.size)
            gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        strays[:] = bounded.strays
        if strays:
            stray = torch.stack(strays).any()
            for buffer, old, version in before:
                if buffer._version != version or any(buffer is item for item in moved):
                    buffer.copy_(torch.where(stray, old, buffer))
            now.flag.copy_(torch.where(stray & (now.flag == 0), STRAY, now.flag))
        _update(now, alike, list(gradients), [rate.unbind() for rate in numbers], update)
        behind, spec = tree_flatten((weight, output if compute.metrics else None))
        template[:] = [[... if torch.is_tensor(part) else part for part in behind], spec]
        return [loss.detach(), *(part.detach() for part in behind if torch.is_tensor(part))]

    arguments = [*held, *rates, *tensors_of(batch)]
    code, constants = code_of(step, arguments, moved)
    behind, spec = template
    return Graph(code, constants, shapes_of(arguments), bool(strays), behind, spec, alike)


def code_of(
    function: Callable[..., Tensors], arguments: Tensors, moved: Tensors
) -> tuple[str, dict[str, torch.Tensor]]:
    """Return a function of tensors as code, with its constants, as in `Graph`."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.graph import CodeGen

    try:
        graph = make_fx(
            function, _decompositions(moved), tracing_mode="fake", _allow_non_fake_inputs=True
        )(*arguments)
    except Unfit:
        raise
    except Exception as error:  # a model's code may raise any error for fake tensors
        raise Unfit(f"it cannot be traced: {first_line(error)}") from error
    nodes = graph.graph.nodes
    if any(map(_draws, nodes)):
        raise Unfit("the model draws random numbers")
    graph.graph.set_codegen(CodeGen())  # flat inputs and outputs
    graph.recompile()
    constants = {n.target: getattr(graph, n.target) for n in nodes if n.op == "get_attr"}
    if not all(isinstance(value, torch.Tensor) for value in constants.values()):
        raise Unfit("a part of the model is no function of tensors")
    return graph.code, constants


def _draws(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    given: Any = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def tensors_of(batch: Batch) -> Tensors:
    """Return the tensors of a batch that a step reads."""
    tensors: Tensors = []
    for part in batch[:3]:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        elif part is not None:
            map_tensors(tensors.append, part)
    return tensors


def shapes_of(tensors: Tensors) -> Shapes:
    """Return shape, strides and dtype of each tensor."""
    return [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors]


def _update(
    now: Places,
    alike: list[list[str]],
    gradients: list[torch.Tensor | None],
    rates: list[Any],
    update: Update,
) -> None:
    result = {n: g for n, g in zip(now.parameters, gradients, strict=True) if g is not None}
    result = dict(zip(result, _clipped(list(result.values()), update), strict=True))
    bad = now.flag != 0
    for gradient in result.values():
        bad = bad | ~gradient.abs().amax().isfinite()
    for (facts, names), numbers in zip(now.groups, rates, strict=True):
        stepping = [name for name in names if name in result]
        if any(len(now.states[name]) != len(now.kind.states(facts)) for name in stepping):
            raise Unfit("the optimizer has not stepped all parameters yet")
        for some in alike:
            same = [name for name in some if name in stepping]
            if not same:
                continue
            factors = now.kind.factors(numbers, facts, now.states[same[0]])
            for name in same:
                old = [now.parameters[name], *now.states[name]]
                new, states = now.kind.update(
                    old[0], result[name], old[1:], numbers, facts, factors
                )
                for tensor, value in zip(old, [new, *states], strict=True):
                    tensor.copy_(torch.where(bad, tensor, value))
    now.flag.copy_(torch.where(now.flag != 0, now.flag, bad.to(now.flag.dtype)))


def _clipped(gradients: Tensors, update: Update) -> Tensors:
    if update.clip_norm is not None:
        norm = torch.stack([g.norm() for g in gradients]).norm()
        share = (update.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [g * share for g in gradients]
    if update.clip_value is not None:
        gradients = [g.clamp(-update.clip_value, update.clip_value) for g in gradients]
    return gradients


def _decompositions(moved: Tensors) -> dict[Any, Callable[..., Any]]:
    return {torch.ops.aten.native_batch_norm.default: partial(_batch_norm, moved)}


def _batch_norm(
    moved: Tensors,
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    aten = torch.ops.aten
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    *result, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, training, momentum, eps
    )
    if training:
        mean.copy_(new_mean)
        var.copy_(new_var)
        moved += [mean, var]
    return tuple(result)
