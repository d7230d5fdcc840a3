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
from flatout.optim import can_fuse, defuse, fuse
from flatout.optim.fused import align_state
from flatout.recipe import ResolvedRecipe

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


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
    """Holds a model and its optimiser at some Settings; `use` brings them to others.

    Everything is done in place: the user's objects, their parameters and their state dict keys
    stay.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.now = Settings(threads=torch.get_num_threads(), allocator=allocator.current())
        self._undo: dict[str, list[Callable[[], None]]] = {}

    def use(self, wanted: Settings) -> None:
        """Bring model, optimiser and process from what they are to `wanted`."""
        now = self.now
        if wanted.memory_format != now.memory_format:
            self.model.to(memory_format=_FORMATS[wanted.memory_format])  # type: ignore[call-overload]
            align_state(self.optimizer)
        if wanted.fused_optimizer != now.fused_optimizer and can_switch(self.optimizer):
            (fuse if wanted.fused_optimizer else defuse)(self.optimizer)
        if wanted.rewrites != now.rewrites:
            self._toggle("rewrites", wanted.rewrites, self._rewrite)
        if wanted.activation_checkpointing != now.activation_checkpointing:
            self._toggle(
                "recompute",
                wanted.activation_checkpointing,
                lambda: [recompute_activations(self.model)],
            )
        if wanted.compile != now.compile:
            self._toggle("compile", wanted.compile, self._compile)
        if wanted.matmul_precision != now.matmul_precision:
            torch.set_float32_matmul_precision(wanted.matmul_precision)
        if wanted.threads != now.threads:
            threads.set_threads(wanted.threads)
        if wanted.allocator != now.allocator:
            (allocator.keep_memory if wanted.allocator == "keep" else allocator.default_memory)()
        self.now = wanted

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which forward runs."""
        dtype = _DTYPES.get(self.now.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype)

    def release(self) -> None:
        """Take the code changes off the model again; weights, layout and optimiser stay."""
        self.use(self.now.but(rewrites=False, compile=False, activation_checkpointing=False))

    def _toggle(self, key: str, on: bool, make: Callable[[], list[Callable[[], None]]]) -> None:
        if on:
            self._undo[key] = make()
        else:
            for undo in reversed(self._undo.pop(key, [])):
                undo()

    def _rewrite(self) -> list[Callable[[], None]]:
        return [rewrite.apply() for rewrite in find_rewrites(self.model)]

    def _compile(self) -> list[Callable[[], None]]:
        self.model.compile()

        def undo() -> None:
            self.model._compiled_call_impl = None

        return [undo]


def can_switch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether fusing is ours to switch: torch can, and the user did not choose."""
    ours = all(g.get("fused") is True and g.get("foreach") is False for g in optimizer.param_groups)
    return can_fuse(optimizer) or ours
