"""Gradient clipping: when it happens, and whether gradients are still scaled then."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from threading import get_ident
from typing import Any
from weakref import WeakSet

from flatout.hooks import Hook, wrap
from flatout.observe.model_facts import local
from flatout.observe.watch import Watch

# Number of first steps whose calls are recorded, since later steps make the same calls.
_STEPS = 6
# Smallest ratio of limit to loss scale at which the limit was probably multiplied by the scale too.
_SCALED = 1 / 8
# Number of skipped steps after which NO_STEP is noted. A scaler starts with a factor that is too
# large, and halves it with each skipped step.
_LEFT_OUT = 24
# Name of the limit argument, by function.
_LIMITS = {"clip_grad_norm_": "max_norm", "clip_grad_value_": "clip_value"}
NO_STEP = (
    f"a GradScaler has left out each of the first {_LEFT_OUT} steps: gradients are NaN or infinite "
    "in all of them, as from a logarithm or root of zero, or a division by it"
)


class Clipping:
    """Hooks on torch's clipping functions and gradient scalers."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._hooks: list[Hook] = []
        self._scalers: WeakSet[Any] = WeakSet()
        # Scalers that have multiplied a loss, but have not divided the gradients yet.
        self._pending: WeakSet[Any] = WeakSet()
        self._updates = 0
        self._begin()
        watch.on_training.append(self._begin)
        watch.at_each(_STEPS, self._end)

    def _begin(self) -> None:
        if self._hooks:
            return
        torch = self._torch
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name, limit in _LIMITS.items():
                self._hooks.append(wrap(owner, name, "observe", self._clipping, limit))
        scaler = {"scale": self._scaling, "unscale_": self._unscaling, "update": self._updating}
        for name, around in scaler.items():
            self._hooks.append(wrap(torch.amp.GradScaler, name, "observe", around))

    def _end(self) -> None:
        self._hooks = [hook for hook in self._hooks if not hook.remove()]
        self._watch.scaled = None

    def _scaling(self, original: Any) -> Any:
        def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self._scalers.add(scaler)
            self._pending.add(scaler)
            scaled = original(scaler, *args, **kwargs)
            # A disabled scaler returns the loss itself.
            node = getattr(scaled, "grad_fn", None)
            self._watch.scaled = node if scaler.is_enabled() else None
            return scaled

        return scale

    def _unscaling(self, original: Any) -> Any:
        def unscale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == self._watch.lanes.thread:
                self._watch.aside(*self._watch.before_clipping)
            self._pending.discard(scaler)
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

    def _clipping(self, original: Any, limit_name: str) -> Any:
        lanes = self._watch.lanes
        is_traced = self._torch.compiler.is_dynamo_compiling

        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            is_seen = args or limit_name in kwargs  # otherwise the function raises an error
            is_over = lanes.steps - self._watch.began > _STEPS
            if not is_seen or is_traced() or is_over or get_ident() != lanes.thread:
                return original(parameters, *args, **kwargs)
            self._watch.aside(*self._watch.before_clipping)
            if isinstance(parameters, Iterable) and not self._torch.is_tensor(parameters):
                parameters = list(parameters)
            limit = float(args[0] if args else kwargs[limit_name])
            is_late = lanes.steps > 0 and not lanes.backwards
            scale = 1.0 if is_late else self._scale_of(parameters)
            is_off = not is_late and any(not scaler.is_enabled() for scaler in self._pending)
            norm = original(parameters, *args, **kwargs)
            if lanes.steps and isfinite(limit):
                detail = {
                    "limit": limit,
                    "norm": None if norm is None else float(norm),
                    "is_late": is_late,
                    "scale": scale if limit < _SCALED * scale else 1.0,
                    "is_scaler_off": is_off,
                }
                self._watch.calls.note("clip", 0, detail=detail)
            return norm

        return clip

    def _scale_of(self, parameters: Any) -> float:
        clipped = {
            id(one) for one in (parameters if isinstance(parameters, list) else [parameters])
        }
        ready = self._torch.amp.grad_scaler.OptState.READY
        for scaler in [scaler for scaler in self._scalers if scaler.is_enabled()]:
            for watched in self._watch.optimizers:
                optimizer = watched.ref()
                state = scaler._per_optimizer_states.get(id(optimizer), {})
                if optimizer is None or state.get("stage", ready) is not ready:
                    continue
                # Frozen parameters have no gradient, and gradients of another optimizer's
                # parameters may be zero.
                mine = [one.grad for one in watched.tensors() if id(one) in clipped]
                if any(one is not None and self._is_any(one) for one in mine):
                    return float(scaler.get_scale())
        return 1.0

    def _is_any(self, gradient: Any) -> bool:
        if gradient.is_sparse:
            return True
        own = local(gradient)
        return not self._torch.equal(own, -own)
