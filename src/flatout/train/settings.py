"""The settings of a step that can be switched on a live model, and switched back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flatout.devices import allocator, threads
from flatout.models import find_rewrites, recompute_activations
from flatout.models.layout import FORMATS, format_of, lay_out
from flatout.optim import Optimizers, as_tuple, can_fuse, defuse, fuse
from flatout.optim.fused import align_state, is_fused
from flatout.recipe import ResolvedRecipe

Undo = Callable[[], None]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """Concrete values of the Recipe's fields that change how a step runs."""

    precision: str = "fp32"
    memory_format: str = "contiguous"
    rewrites: bool = False
    fused_optimizer: bool = False
    compile: bool = False
    matmul_precision: str = "highest"
    activation_checkpointing: bool = False
    allocator: str = "default"
    threads: int = 0

    @classmethod
    def of(cls, recipe: ResolvedRecipe) -> Settings:
        """The settings that a resolved Recipe asks for."""
        return cls(
            precision=recipe.compute.precision,
            memory_format=recipe.compute.memory_format,
            rewrites=recipe.compute.rewrites == "on",
            fused_optimizer=recipe.compute.fused_optimizer == "on",
            compile=recipe.compute.compile == "on",
            matmul_precision=recipe.compute.matmul_precision,
            activation_checkpointing=recipe.memory.activation_checkpointing == "on",
            allocator=recipe.memory.allocator,
            threads=int(recipe.process.threads),
        )

    def but(self, **changes: Any) -> Settings:
        """These settings with some changed."""
        return replace(self, **changes)


class Switch:
    """Holds a model and its optimizers at some Settings; `use` brings them to others.

    Everything is done in place: the user's objects, their parameters and their state dict keys
    stay.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, device: torch.device) -> None:
        self.model = model
        self.optimizers = as_tuple(optimizers)
        self.device = device
        self.now = Settings(
            memory_format=format_of(model),
            fused_optimizer=any(map(is_fused, self.optimizers)),
            matmul_precision=torch.get_float32_matmul_precision(),
            allocator=allocator.current(),
            threads=torch.get_num_threads(),
        )
        # In the order in which they lie on top of one another: rewriting leaves alone what is
        # recomputed, and both must be there before the model is compiled.
        self._layers: dict[str, Callable[[], list[Undo]]] = {
            "activation_checkpointing": lambda: [recompute_activations(self.model)],
            "rewrites": lambda: [rewrite.apply() for rewrite in find_rewrites(self.model)],
            "compile": lambda: [_compile(self.model)],
        }
        self._undo: dict[str, list[Undo]] = {}

    def use(self, wanted: Settings) -> None:
        """Bring model, optimizer and process from what they are to `wanted`."""
        now = self.now
        # The optimizer's state follows its parameters before a fused kernel sees both.
        if wanted.memory_format != now.memory_format:
            lay_out(self.model, FORMATS[wanted.memory_format])
            for optimizer in self.optimizers:
                align_state(optimizer)
        # Asked of the optimizer itself: a state that was loaded meanwhile brings its own options.
        for optimizer in self.optimizers:
            if wanted.fused_optimizer != is_fused(optimizer) and can_switch(optimizer):
                (fuse if wanted.fused_optimizer else defuse)(optimizer)
        if wanted.matmul_precision != now.matmul_precision:
            torch.set_float32_matmul_precision(wanted.matmul_precision)
        if wanted.threads != now.threads:
            threads.set_threads(wanted.threads)
        if wanted.allocator != now.allocator:
            (allocator.keep_memory if wanted.allocator == "keep" else allocator.default_memory)()
        # What has been done stays known if changing the code fails.
        self.now = wanted.but(**{name: getattr(now, name) for name in self._layers})
        self._change_code(wanted)

    def _change_code(self, wanted: Settings) -> None:
        """Take layers off down to the lowest that changes, and put on those that are wanted."""
        names = list(self._layers)
        changing = [n for n in names if getattr(wanted, n) != getattr(self.now, n)]
        if not changing:
            return
        above = names[names.index(changing[0]) :]
        for name in reversed(above):
            for undo in reversed(self._undo.pop(name, [])):
                undo()
        self.now = self.now.but(**dict.fromkeys(above, False))
        for name in above:
            if getattr(wanted, name):
                self._undo[name] = self._layers[name]()
                self.now = self.now.but(**{name: True})

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which forward runs."""
        dtype = _DTYPES.get(self.now.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype)

    def release(self) -> None:
        """Take the code changes off the model again; weights, layout and optimizer stay."""
        self.use(self.now.but(rewrites=False, compile=False, activation_checkpointing=False))


def can_switch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether fusing is ours to switch: torch can, and the user did not choose."""
    return can_fuse(optimizer) or is_fused(optimizer)


def _compile(model: nn.Module) -> Undo:
    before = model._compiled_call_impl
    model.compile()

    def undo() -> None:
        model._compiled_call_impl = before

    return undo
