"""Parts of forward that `torch.utils.checkpoint` recomputes in backward: their time and memory.

The recomputation takes about as long as the part took in forward.
"""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns
from typing import Any

from flatout.hooks import Hook, when_imported, wrap
from flatout.observe.lanes import BACKWARD
from flatout.observe.watch import Watch

KIND = "checkpoint"
# _COUNTED_FROM, _COUNTED_UNTIL: steps between which bytes are counted; _TIMED_UNTIL: step until
# which times are recorded.
_COUNTED_FROM, _COUNTED_UNTIL, _TIMED_UNTIL = 2, 6, 20


class Checkpointed:
    """Time and memory of the checkpointed parts of a forward pass, from the first steps."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._module: Any = None
        self._hooks: list[Hook] = []
        self._bytes = 0
        self._known: set[int] = set()
        watch.on_renewal.append(self._begin)
        watch.at(_TIMED_UNTIL, self._end)
        when_imported("torch.utils.checkpoint", self._hook_into)

    @property
    def mb(self) -> float | None:
        """MiB that forward would keep of these parts without checkpointing, per step.

        None where no bytes were counted.
        """
        steps = min(self._watch.lanes.steps, _COUNTED_UNTIL) - _COUNTED_FROM
        return self._bytes / 2**20 / steps if self._bytes and steps > 0 else None

    def _hook_into(self, module: Any) -> None:
        self._module = module
        self._begin()

    def _begin(self) -> None:
        self._bytes = 0
        if self._module is None or self._hooks:
            return
        plain = getattr(self._module, "_checkpoint_hook", None)
        if plain is not None:
            self._hooks += [
                wrap(plain, "__init__", "observe", self._begins),
                wrap(plain, "__exit__", "observe", self._ends),
            ]
        reentrant = self._module.CheckpointFunction
        self._hooks.append(wrap(reentrant, "forward", "observe", self._of_reentrant))

    def _end(self) -> None:
        self._hooks = [hook for hook in self._hooks if not hook.remove()]
        if not self._hooks and self._watch.calls.count(KIND):
            self._watch.calls.spread(KIND, self._watch.lanes.steps)

    def _is_forward(self) -> bool:
        lanes = self._watch.lanes
        return get_ident() == lanes.thread and lanes.current != BACKWARD

    @property
    def _counts(self) -> bool:
        return _COUNTED_FROM <= self._watch.lanes.steps < _COUNTED_UNTIL

    def _begins(self, original: Any) -> Any:
        def init(context: Any, *args: Any, **kwargs: Any) -> None:
            original(context, *args, **kwargs)
            if not self._is_forward():
                return
            context.began = perf_counter_ns()
            pack = getattr(context, "pack_hook", None)
            if pack is not None and self._counts:
                self._known.clear()

                def packed(tensor: Any) -> Any:
                    self._count(tensor)
                    return pack(tensor)

                context.pack_hook = packed

        return init

    def _ends(self, original: Any) -> Any:
        def leave(context: Any, *args: Any) -> Any:
            began = getattr(context, "began", None)
            if began is not None:
                self._watch.calls.note(KIND, perf_counter_ns() - began)
            return original(context, *args)

        return leave

    def _of_reentrant(self, original: Any) -> Any:
        def forward(ctx: Any, run: Any, *args: Any) -> Any:
            if not self._is_forward():
                return original(ctx, run, *args)
            began = perf_counter_ns()
            value = original(ctx, run, *args)
            self._watch.calls.note(KIND, perf_counter_ns() - began)
            if self._counts:
                ctx.run_function = self._counted(run)
            return value

        return forward

    def _counted(self, run: Any) -> Any:
        def again(*args: Any) -> Any:
            self._known.clear()
            with self._torch.autograd.graph.saved_tensors_hooks(self._count, lambda kept: kept):
                return run(*args)

        return again

    def _count(self, tensor: Any) -> Any:
        held = tensor if tensor._base is None else tensor._base
        if not isinstance(held, self._torch.nn.Parameter):
            try:
                storage = tensor.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError):
                return tensor  # a kind of tensor without a storage
            if address not in self._known:
                self._known.add(address)
                self._bytes += size
        return tensor
