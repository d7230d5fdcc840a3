"""Gradients that are clipped: when, and whether a scaler has them multiplied then."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from threading import get_ident
from typing import Any
from weakref import WeakSet

from flatout.hooks import Hook, wrap
from flatout.observe.watch import Watch

# Calls in so many steps are looked at: they come alike.
_STEPS = 6
# A norm that is no smaller than this share of the scale was multiplied by it, too.
_SCALED = 1 / 8
# A scaler begins with a factor that is too large, and halves it with each step that it leaves out.
_LEFT_OUT = 24
NO_STEP = (
    f"a GradScaler has left out each of the first {_LEFT_OUT} steps: gradients are NaN or infinite "
    "in all of them, as from a logarithm or root of zero, or a division by it"
)


class Clipping:
    """Watches torch's functions that clip, and its scalers."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._hooks: list[Hook] = []
        self._scalers: WeakSet[Any] = WeakSet()
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                self._hooks.append(wrap(owner, name, "observe", self._clipping))
        self._updates = 0
        scaler = {"scale": self._scaling, "unscale_": self._unscaling, "update": self._updating}
        for name, around in scaler.items():
            self._hooks.append(wrap(torch.amp.GradScaler, name, "observe", around))
        watch.at(_STEPS, self._end)

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._watch.scaled = None

    def _scaling(self, original: Any) -> Any:
        def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self._scalers.add(scaler)
            scaled = original(scaler, *args, **kwargs)
            self._watch.scaled = getattr(scaled, "grad_fn", None)
            return scaled

        return scale

    def _unscaling(self, original: Any) -> Any:
        def unscale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == self._watch.lanes.thread:
                self._watch.aside(*self._watch.before_clipping)
            return original(scaler, *args, **kwargs)

        return unscale

    def _updating(self, original: Any) -> Any:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            self._updates += 1
            if self._updates == _LEFT_OUT and not self._watch.lanes.steps:
                self._watch.notes[NO_STEP] = None
            return result

        return update

    def _clipping(self, original: Any) -> Any:
        lanes = self._watch.lanes
        is_traced = self._torch.compiler.is_dynamo_compiling

        def clip(parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
            if is_traced() or lanes.steps > _STEPS or get_ident() != lanes.thread:
                return original(parameters, limit, *args, **kwargs)
            self._watch.aside(*self._watch.before_clipping)
            if isinstance(parameters, Iterable) and not self._torch.is_tensor(parameters):
                parameters = list(parameters)
            is_late = lanes.steps > 0 and not lanes.backwards
            scale = 1.0 if is_late else self._scale_of(parameters)
            norm = original(parameters, limit, *args, **kwargs)
            if lanes.steps and isfinite(float(limit)):
                detail = {
                    "limit": float(limit),
                    "norm": None if norm is None else float(norm),
                    "is_late": is_late,
                    "scale": scale if float(limit) < _SCALED * scale else 1.0,
                }
                self._watch.calls.note("clip", 0, detail=detail)
            return norm

        return clip

    def _scale_of(self, parameters: Any) -> float:
        """By what a scaler has these gradients multiplied now."""
        first = parameters[:1] if isinstance(parameters, list) else [parameters]
        wanted = {id(tensor) for tensor in first}
        for scaler in list(self._scalers):
            for watched in self._watch.optimizers:
                optimizer = watched.ref()
                if optimizer is None or wanted.isdisjoint(
                    id(tensor) for tensor in watched.tensors()
                ):
                    continue
                state = scaler._per_optimizer_states.get(id(optimizer), {})
                ready = self._torch.amp.grad_scaler.OptState.READY
                if scaler.is_enabled() and state.get("stage", ready) is ready:
                    return float(scaler.get_scale())
        return 1.0
