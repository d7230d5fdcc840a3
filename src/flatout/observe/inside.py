"""Facts from within a model: autocast in its forward, and the time of its frozen submodules.

The facts come from hooks on some of the model's modules, in a few steps only.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

from flatout.hooks import after_forward, before_forward, is_anything_compiled
from flatout.observe.model_facts import drops_within, unwrapped
from flatout.observe.watch import Watch

# _FROM: step after which modules are hooked; _STEPS: number of measured steps.
_FROM, _STEPS = 4, 3


class Inside:
    """Measurements within trained models, and of models that no optimizer steps."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._looks: list[_Look | _LookAtBackbone] = []
        watch.at(_FROM, self._open)

    def _open(self) -> None:
        if is_anything_compiled():
            return  # hooks would make torch.compile compile again
        for model in self._watch.models:
            module = model.ref()
            if module is None or isinstance(module, self._torch.jit.ScriptModule):
                continue
            if model.is_stepped:
                self._looks.append(_Look(self._torch, module, model.facts))
            elif model.has_parameters and model.facts.device_type == "cpu":
                self._looks.append(_LookAtBackbone(self._torch, module, model, self._watch))
        self._watch.at(_FROM + _STEPS, self._close)

    def _close(self) -> None:
        for look in self._looks:
            look.end()
        self._looks.clear()


class _Look:
    """Hooks on one model's modules."""

    def __init__(self, torch: Any, module: Any, facts: Any) -> None:
        self._torch = torch
        self._facts = facts
        self._parts = list(frozen_parts(module))
        self._versions = self._versions_now()
        self._whole_ns = self._frozen_ns = 0
        self._began: dict[int, int] = {}
        self._handles = []
        inner = next((m for m in module.modules() if is_leaf(m)), None)
        if inner is not None:
            self._handles.append(before_forward(inner, self._look_at_autocast))
        if self._parts:
            for part in (module, *self._parts):
                self._handles.append(before_forward(part, self._begins))
            self._handles.append(after_forward(module, self._whole))
            for part in self._parts:
                self._handles.append(after_forward(part, self._frozen))

    def _look_at_autocast(self, module: Any, args: Any) -> None:
        for device in ("cuda", "cpu"):
            if self._torch.is_autocast_enabled(device) and self._torch.is_grad_enabled():
                name = str(self._torch.get_autocast_dtype(device))
                self._facts.autocast = name.removeprefix("torch.")

    def _begins(self, module: Any, args: Any) -> None:
        self._began[id(module)] = perf_counter_ns()

    def _whole(self, module: Any, args: Any, output: Any) -> None:
        self._whole_ns += perf_counter_ns() - self._began.pop(id(module))

    def _frozen(self, module: Any, args: Any, output: Any) -> None:
        took = perf_counter_ns() - self._began.pop(id(module))
        # A frozen submodule whose input requires gradients is not at the beginning of the model.
        if not any(getattr(arg, "requires_grad", False) for arg in args):
            self._frozen_ns += took

    def _versions_now(self) -> list[int] | None:
        try:
            return [tensor._version for part in self._parts for tensor in part.parameters()]
        except RuntimeError:  # tensors made in inference mode have no version
            return None

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        if not self._parts:
            self._facts.frozen_share = 0.0
        elif self._whole_ns and self._facts.device_type == "cpu":
            # Weights that change without a gradient, such as a moving average, are not frozen.
            is_still = self._versions is not None and self._versions == self._versions_now()
            self._facts.frozen_share = self._frozen_ns / self._whole_ns if is_still else 0.0


class _LookAtBackbone:
    """Hooks on a module that no optimizer steps, to measure its time per step."""

    def __init__(self, torch: Any, module: Any, seen: Any, watch: Watch) -> None:
        self._torch, self._module, self._seen, self._watch = torch, module, seen, watch
        self._state = _state_of(module)
        self._ns = 0
        self._began: int | None = None
        self._in_steps: set[int] = set()
        self._handles = [
            before_forward(module, self._begins),
            after_forward(module, self._ends),
        ]

    def _begins(self, module: Any, args: Any) -> None:
        wants = any(getattr(arg, "requires_grad", False) for arg in args)
        acts = any(acts_in_training(inner) for inner in module.modules())
        self._began = None if wants or acts else perf_counter_ns()

    def _ends(self, module: Any, args: Any, output: Any) -> None:
        if self._began is None or getattr(output, "requires_grad", True):
            return
        self._ns += perf_counter_ns() - self._began
        self._in_steps.add(self._watch.lanes.steps)

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        is_still = self._state is not None and self._state == _state_of(self._module)
        if is_still and len(self._in_steps) >= _STEPS:
            self._seen.alone_ms = self._ns / len(self._in_steps) / 1e6


def _state_of(module: Any) -> list[Any] | None:
    try:
        return [(id(item), item._version) for item in (*module.parameters(), *module.buffers())]
    except RuntimeError:  # tensors made in inference mode have no version
        return None


def frozen_parts(module: Any) -> Iterator[Any]:
    """Yield the outermost submodules that have weights, none of them trainable.

    Modules that act in train mode, as dropout and BatchNorm do, are left out.
    """
    for root in unwrapped(module)[-1:]:
        yield from _frozen_in(root)


def _frozen_in(module: Any) -> Iterator[Any]:
    for child in module.children():
        weights = list(child.parameters())
        if not weights:
            continue
        if any(tensor.requires_grad for tensor in weights):
            yield from _frozen_in(child)
        elif not any(acts_in_training(inner) for inner in child.modules()):
            yield child


def acts_in_training(module: Any) -> bool:
    """Return whether the module is in train mode, and then draws numbers or updates statistics."""
    name = type(module).__name__
    is_one = any(kind in name for kind in ("Dropout", "BatchNorm", "DropPath"))
    return bool(module.training) and (is_one or drops_within(module))


def is_leaf(module: Any) -> bool:
    """Return whether the module has parameters of its own and no submodules."""
    return bool(module._parameters) and not module._modules
