"""Most calls of a step are like those before, and are seen in C: during training, where caches are
full of other things, a hook in Python takes several times as long.

What is new goes to the hook in Python that the one in C stands for. The first steps do, and all of
them where something is compiled: torch.compile cannot look into C, so that the hooks in Python are
back in their places before anything is traced.
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

# After so many steps the models are known, and the classes that are watched.
AFTER_STEPS = 4
# What makes the graph of everything that is traced.
_TRACER = "torch._dynamo.output_graph"

_alive: WeakSet[Quick] = WeakSet()


class Quick:
    """The hooks in C, and the places in which they stand.

    Attributes:
        is_on: whether they stand there now.
        hooks: to be made again whenever that has changed.
        on_end: called before anything is traced.
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
        """Puts them into their places, in the thread that steps, unless something is compiled."""
        self._put(self._is_possible and not is_anything_compiled())

    def rest(self) -> None:
        """Takes them away until they begin again."""
        self._put(False)

    def renew(self) -> None:
        """Takes them away until they begin again, and counts from there."""
        self.rest()
        for hook in self._all():
            hook.renew()

    def _all(self) -> list[Any]:
        hooks = self._backward, self._forward, self._steps, self._batches, self._fetches
        return [hook for kind in hooks for hook in kind]

    def end(self) -> None:
        """Takes them away for good."""
        self._is_possible = False
        self._put(False)
        while self.on_end:
            self.on_end.pop()()

    @property
    def backwards(self) -> int:
        """Backward passes that the hook in Python was not asked about."""
        return sum(hook.ran for hook in self._backward)

    @property
    def calls(self) -> int:
        """Calls of models likewise."""
        return sum(hook.ran for hook in self._forward)

    @property
    def seen_calls(self) -> int:
        """Calls of models while the hook in C was there, whether Python was asked or not."""
        return sum(hook.ran + hook.handed for hook in self._forward)

    @property
    def batches(self) -> int:
        """Batches likewise."""
        return sum(hook.ran for hook in self._batches)

    @property
    def fetches(self) -> int:
        """Batches that were made in this process likewise."""
        return sum(hook.ran for hook in self._fetches)

    @property
    def steps(self) -> int:
        """Steps of optimizers likewise."""
        return sum(hook.ran for hook in self._steps)

    def backward(self, original: Any, otherwise: Any) -> Any:
        """The hook for backward passes: the one in C, or `otherwise`, the one in Python."""
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
        """The hook for the calls of models: the one in C, or `otherwise`, the one in Python."""
        if not self.is_on:
            return otherwise
        hook = ForwardHook(self._clock, original, otherwise, known, is_grad_enabled)
        self._forward.append(hook)
        return hook

    def batch(self, original: Any, otherwise: Any) -> Any:
        """The hook for batches that a loader gives: the one in C, or `otherwise`."""
        if not self.is_on:
            return otherwise
        self._batches.append(BatchHook(self._clock, original, otherwise))
        return self._batches[-1]

    def samples(self, original: Any, otherwise: Any) -> Any:
        """That for which samples they are made of: the one in C, or `otherwise`."""
        if not self.is_on:
            return otherwise
        return SamplesHook(self._clock, original, otherwise)

    def fetch(self, original: Any, otherwise: Any) -> Any:
        """That for how they are made: the one in C, or `otherwise`."""
        if not self.is_on:
            return otherwise
        self._fetches.append(FetchHook(self._clock, original, otherwise))
        return self._fetches[-1]

    def stand_for_steps(
        self, handles: tuple[Any, Any], begins: Any, ends: Any, attend: Callable[[], None]
    ) -> StepHook | None:
        """For the hooks that torch has given these handles; None where that cannot be."""
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
            end_all()  # a torch of which nothing is known
            return
        wrap(module.OutputGraph, "__init__", "observe", first_end_all)

    when_imported(_TRACER, hook_into)


def _in_dict(hooks: Any, key: Any, otherwise: Any, quick: Any) -> Callable[[bool], None]:
    def put(is_quick: bool) -> None:
        old, new = (otherwise, quick) if is_quick else (quick, otherwise)
        if hooks.get(key) == old:  # methods, which are bound again each time
            hooks[key] = new

    return put
