"""Parts of a torch module that stay in evaluation mode, even after `.train()`.

The graph of each written `forward` shows which parts run before a layer, level by level down to the
layer. If a graph might not be the same program, the order in which modules are registered decides.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from flatout.models.trace import trace


class Held:
    """The `train` method of a module that stays in evaluation mode.

    It is an attribute of the module, so every call of `.train()` finds it. It refers to the module
    weakly, so that an unused model is freed. A copy or pickle of the module gets its own `Held`.
    """

    def __init__(self, module: nn.Module, trained: tuple[str, ...], mode: bool) -> None:
        self._module = weakref.ref(module)
        self.trained = trained
        self.mode = mode

    def __call__(self, mode: bool = True) -> nn.Module:
        """Stay in evaluation mode. Submodules have a `Held` of their own."""
        module = self._module()
        assert module is not None
        module.training, self.mode = False, mode
        for child in module.children():
            child.train(mode)
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, (self._module(), self.trained, self.mode)


def hold(module: nn.Module) -> None:
    """Set a module and all its submodules to neither train nor act as in training."""
    for part in module.modules():
        if not is_held(part):
            own = part.named_parameters(recurse=False)
            trained = tuple(name for name, value in own if value.requires_grad)
            # This bypasses torch's own __setattr__, which wrappers override.
            vars(part)["train"] = Held(part, trained, part.training)
        part.training = False
        fix(part.parameters(recurse=False))


def release(part: nn.Module) -> None:
    """Let one module train and follow `.train()` again; its submodules stay as they are."""
    own = dict(part.named_parameters(recurse=False))
    if is_held(part):
        own = {name: own[name] for name in vars(part)["train"].trained if name in own}
        follow(part)
    for value in own.values():
        if value.is_floating_point() or value.is_complex():
            value.requires_grad_(True)


def follow(part: nn.Module) -> None:
    """Let one module follow `.train()` again, in the mode of the last such call."""
    if is_held(part):
        part.training = vars(part).pop("train").mode


def is_held(part: nn.Module) -> bool:
    """Return whether a module stays in evaluation mode."""
    return isinstance(vars(part).get("train"), Held)


def fix(parameters: Iterable[nn.Parameter]) -> None:
    """Stop the training of parameters. Optimizers skip parameters without a gradient."""
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None


def keeps_statistics(part: nn.Module) -> bool:
    """Return whether a layer normalizes by running statistics, as BatchNorm does."""
    return isinstance(part, _NormBase)


def matching(names: Iterable[str], patterns: Iterable[str]) -> dict[str, list[str]]:
    known = list(names)
    return {p: [name for name in known if fnmatchcase(name, p)] for p in patterns}


def hold_until(module: nn.Module, path: str) -> None:
    level = _traced(module, path) or _registered(module, path)
    fix(level.parameters)
    for part in level.before:
        if any(part is item for item in level.behind):
            # not held in evaluation: it also runs after the layer, where it may act as in training
            fix(part.parameters())
        else:
            hold(part)
    if level.rest:
        hold_until(level.last, level.rest)
    else:
        hold(level.last)


@dataclass(frozen=True)
class _Level:
    """The parts of one `forward` that run before a layer.

    Attributes:
        parameters: parameters of this module itself.
        before: submodules that run completely before the layer.
        last: the submodule that is the layer or contains it.
        rest: the path of the layer within `last`; "" if it is the layer.
        behind: submodules that also run after the layer.
    """

    parameters: list[nn.Parameter]
    before: list[nn.Module]
    last: nn.Module
    rest: str
    behind: list[nn.Module]


def _traced(module: nn.Module, path: str) -> _Level | None:
    traced = trace(module)
    if traced is None:
        return None
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    to_it = [node for node in calls if f"{path}.".startswith(f"{node.target}.")]
    if not to_it:
        return None
    flow = set(_flow_into(to_it))
    before = [node for node in calls if node in flow and node not in to_it]
    own = [node.target for node in flow if node.op == "get_attr"]
    target = str(to_it[-1].target)
    values = (_attribute(module, str(name)) for name in own)
    return _Level(
        [value for value in values if isinstance(value, nn.Parameter)],
        [module.get_submodule(str(node.target)) for node in before],
        module.get_submodule(target),
        path[len(target) + 1 :],
        [module.get_submodule(str(node.target)) for node in calls if node not in flow],
    )


def _flow_into(nodes: list[fx.Node]) -> Iterator[fx.Node]:
    waiting, met = list(nodes), set(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        new = [above for above in node.all_input_nodes if above not in met]
        met.update(new)
        waiting += new


def _attribute(module: nn.Module, path: str) -> torch.Tensor | None:
    result: Any = module
    for name in path.split("."):
        result = getattr(result, name, None)
    return result if isinstance(result, torch.Tensor) else None


def _registered(module: nn.Module, path: str) -> _Level:
    first, _, rest = path.partition(".")
    before: list[nn.Module] = []
    for name, child in module.named_children():
        if name == first:
            break
        before.append(child)
    return _Level(
        list(module.parameters(recurse=False)), before, module.get_submodule(first), rest, []
    )
