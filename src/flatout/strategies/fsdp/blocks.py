"""Selection of the modules that are gathered as one block under fsdp, by size and use.

A block's parameters are whole only while its forward or backward runs. If a module reads a
parameter from outside (tied layers, or attention that uses the weights of a layer it never calls),
that module is no block: its parameters are gathered with the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flatout.errors import ModelError
from flatout.models import own_names

# Smallest block, as a share of the model's bytes: each block costs collectives.
_LEAST = 1 / 32
# Largest block, as a share of the model's bytes. Larger ones are divided further if possible.
_MOST = 1 / 4
_LISTS = (nn.ModuleList, nn.ModuleDict)


def blocks_of(model: nn.Module, run: Callable[[], object] | None) -> list[nn.Module]:
    reads = _Reads(model)
    if run is not None:
        reads.watch(run)
    total = _bytes_in(model)
    return list(_within(model, reads, total)) if total else []


def _within(module: nn.Module, reads: _Reads, total: int) -> Iterator[nn.Module]:
    is_list = isinstance(module, (*_LISTS, nn.Sequential))
    for child in module.children():
        size = _bytes_in(child)
        if size < _LEAST * total:
            continue
        may_be = reads.may_be_block(child, is_list)
        inner: list[nn.Module] = []
        if size > _MOST * total or not may_be:
            inner = list(_within(child, reads, total))
            yield from inner
        if may_be and size - sum(map(_bytes_in, inner)) >= _LEAST * total:
            yield child


def _bytes_in(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


class _Reads:
    """Reads of a model's parameters: the called modules, and reads from outside of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owners: dict[nn.Parameter, list[nn.Module]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(parameter, []).append(module)
        self._called: set[nn.Module] | None = None
        # By parameter, the modules that were running at every read of it.
        self._readers: dict[nn.Parameter, set[nn.Module]] = {}

    def watch(self, run: Callable[[], object]) -> None:
        running: list[nn.Module] = []
        called: set[nn.Module] = set()

        def enter(module: nn.Module, _: Any) -> None:
            running.append(module)
            called.add(module)

        def leave(module: nn.Module, *_: Any) -> None:
            running.pop()

        with ExitStack() as hooks:
            for module in self._model.modules():
                hooks.callback(module.register_forward_pre_hook(enter).remove)
                hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
            with _Watch(lambda p: self._read(p, running), self._owners.keys()):
                run()
        self._called = called

    def _read(self, parameter: nn.Parameter, running: list[nn.Module]) -> None:
        if self._model not in running:
            names = {p: name for name, p in self._model.named_parameters()}
            name = own_names(self._model, [names[parameter]])[names[parameter]]
            raise ModelError(
                f"world.strategy=fsdp gathers weights while the model's forward runs, and {name} "
                "is read outside of it",
                do="compute all that uses weights in the forward of the model that is trained, "
                "or train with world.strategy=ddp",
            )
        now = set(running)
        self._readers[parameter] = self._readers.get(parameter, now) & now

    def may_be_block(self, module: nn.Module, is_member: bool) -> bool:
        if isinstance(module, _LISTS):
            return False
        if self._called is None:
            inside = set(module.modules())
            return is_member and all(set(self._owners[p]) <= inside for p in module.parameters())
        if module not in self._called:
            return False
        inside = set(module.modules())
        return all(
            set(self._owners[p]) <= inside and module in self._readers.get(p, {module})
            for p in module.parameters()
        )


class _Watch(TorchFunctionMode):
    """Reports each parameter that a torch function gets."""

    def __init__(self, tell: Callable[[nn.Parameter], None], of: Any) -> None:
        super().__init__()
        self._tell, self._of = tell, of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # other results mean that only the form was read
        if isinstance(result, torch.Tensor | tuple | list):
            for value in (*args, *(kwargs or {}).values()):
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, nn.Parameter) and item in self._of:
                        self._tell(item)
        return result
