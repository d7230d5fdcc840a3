"""Fast path for hooks: most calls are recorded in C.

During training the CPU's caches are full of other data, so that a hook in Python takes several
times as long. A call that differs from earlier calls goes to the Python hook that the C hook
replaces. The Python hooks also handle the first steps, and all steps where something is compiled.
torch.compile cannot trace C code, so the Python hooks are restored before anything is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

from flatout.hooks import Hook, is_anything_compiled, when_imported, wrap
from flatout.kernels import (
    BackwardHook,
    BatchHook,
    Clock,
    FetchHook,
    ForwardHook,
    SamplesHook,
    StepHook,
)

# Number of steps after which the models and their classes are known.
AFTER_STEPS = 4
# Module whose OutputGraph is made for each traced function.
_TRACER = "torch._dynamo.output_graph"

_alive: WeakSet[Quick] = WeakSet()


class Quick:
    """The hooks in C, and the attributes in which they are installed.

    Attributes:
        is_on: whether the C hooks are installed now.
        hooks: Python hooks that are made again whenever `is_on` changes.
        on_end: functions that are called before anything is traced.
    """

    def __init__(self, clock: Clock) -> None:
        self.is_on = False
        self._clock = clock
        self._is_possible = True
        self.hooks: list[Hook] = []
        self.on_end: list[Callable[[], object]] = []
        self._puts: list[Callable[[bool], None]] = []
        self._backward: list[BackwardHook] = []
        self._forward: list[ForwardHook] = []
        self._steps: list[StepHook] = []
        self._batches: list[BatchHook] = []
        self._fetches: list[FetchHook] = []
        _alive.add(self)
        _watch_tracing()

    def begin(self) -> None:
        """Install the hooks in the stepping thread, unless something is compiled."""
        self._put(self._is_possible and not is_anything_compiled())

    def rest(self) -> None:
        """Remove the hooks until `begin` is called again."""
        self._put(False)

    def renew(self) -> None:
        """Remove the hooks until `begin` is called again, and count from zero."""
        self.rest()
        for hook in self._all():
            hook.renew()

    def _all(self) -> list[Any]:
        hooks = self._backward, self._forward, self._steps, self._batches, self._fetches
        return [hook for kind in hooks for hook in kind]

    def end(self) -> None:
        """Remove the hooks for good."""
        self._is_possible = False
        self._put(False)
        while self.on_end:
            self.on_end.pop()()

    @property
    def backwards(self) -> int:
        """Number of backward passes that only the C hook handled."""
        return sum(hook.ran for hook in self._backward)

    @property
    def calls(self) -> int:
        """Number of model calls that only the C hook handled."""
        return sum(hook.ran for hook in self._forward)

    @property
    def seen_calls(self) -> int:
        """Number of model calls while the C hook was installed, also those passed to Python."""
        return sum(hook.ran + hook.handed for hook in self._forward)

    @property
    def batches(self) -> int:
        """Number of batches that only the C hook handled."""
        return sum(hook.ran for hook in self._batches)

    @property
    def fetches(self) -> int:
        """Number of batches made in this process whose fetch only the C hook handled."""
        return sum(hook.ran for hook in self._fetches)

    @property
    def steps(self) -> int:
        """Number of optimizer steps that only the C hook handled."""
        return sum(hook.ran for hook in self._steps)

    def backward(self, original: Any, otherwise: Any) -> Any:
        """Return the hook for backward passes: the C hook, or the Python hook `otherwise`."""
        if not self.is_on:
            return otherwise
        self._backward.append(BackwardHook(self._clock, original, otherwise))
        return self._backward[-1]

    def call(
        self,
        original: Any,
        otherwise: Any,
        known: dict[int, Any],
        is_grad_enabled: Callable[[], bool],
    ) -> Any:
        """Return the hook for model calls: the C hook, or the Python hook `otherwise`."""
        if not self.is_on:
            return otherwise
        hook = ForwardHook(self._clock, original, otherwise, known, is_grad_enabled)
        self._forward.append(hook)
        return hook

    def batch(self, original: Any, otherwise: Any) -> Any:
        """Return the hook for a loader's batches: the C hook, or the Python hook `otherwise`."""
        if not self.is_on:
            return otherwise
        self._batches.append(BatchHook(self._clock, original, otherwise))
        return self._batches[-1]

    def samples(self, original: Any, otherwise: Any) -> Any:
        """Return the hook for a batch's sample indices: the C hook, or the Python hook."""
        if not self.is_on:
            return otherwise
        return SamplesHook(self._clock, original, otherwise)

    def fetch(self, original: Any, otherwise: Any) -> Any:
        """Return the hook for the fetch of a batch: the C hook, or the Python hook `otherwise`."""
        if not self.is_on:
            return otherwise
        self._fetches.append(FetchHook(self._clock, original, otherwise))
        return self._fetches[-1]

    def stand_for_steps(
        self, handles: tuple[Any, Any], begins: Any, ends: Any, attend: Callable[[], None]
    ) -> StepHook | None:
        """Replace optimizer step hooks by a C hook where possible.

        Args:
            handles: handles of torch's pre-hook and post-hook.
            begins, ends: the Python hooks.
            attend: function that is called when a step is due.

        Returns:
            The C hook; None after `end`.
        """
        if not self._is_possible:
            return None
        hook = StepHook(self._clock, begins, ends, attend)
        for handle, otherwise, quick in zip(
            handles, (begins, ends), (hook.begin, hook.end), strict=True
        ):
            put = _in_dict(handle.hooks_dict_ref(), handle.id, otherwise, quick)
            self._puts.append(put)
            put(self.is_on)
        self._steps.append(hook)
        return hook

    def _put(self, is_on: bool) -> None:
        if is_on != self.is_on:
            self.is_on = is_on
            for put in self._puts:
                put(is_on)
            for hook in self.hooks:
                hook.remake()


@cache
def _watch_tracing() -> None:
    def end_all() -> None:
        for quick in list(_alive):
            quick.end()

    def first_end_all(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            end_all()
            original(self, *args, **kwargs)

        return init

    def hook_into(module: Any) -> None:
        if not hasattr(module, "OutputGraph"):
            end_all()  # an unknown version of torch
            return
        wrap(module.OutputGraph, "__init__", "observe", first_end_all)

    when_imported(_TRACER, hook_into)


def _in_dict(hooks: Any, key: Any, otherwise: Any, quick: Any) -> Callable[[bool], None]:
    def put(is_quick: bool) -> None:
        old, new = (otherwise, quick) if is_quick else (quick, otherwise)
        if hooks.get(key) == old:  # not `is`: methods are bound again each time
            hooks[key] = new

    return put
