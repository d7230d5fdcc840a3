"""Most calls of a step are like those before, and are seen in C: amid training, where caches are
full of other things, a hook in Python takes several times as long.

What is new goes to the hook in Python that the one in C stands for. The first steps do, and all of
them where something is compiled: torch.compile cannot look into C, so that the hooks in Python are
back in their places before anything is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, update_wrapper, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from flatout.kernels.clock import Clock, available
from flatout.observe.compiling import is_anything_compiled
from flatout.observe.importing import when_imported

if TYPE_CHECKING:
    from flatout.kernels._clock import BackwardHook, ForwardHook, StepHook

# After so many steps the models are known, and the classes that are watched.
AFTER_STEPS = 4
# What makes the graph of everything that is traced.
_TRACER = "torch._dynamo.output_graph"

_alive: WeakSet[Quick] = WeakSet()


class Quick:
    """The hooks in C, and the places in which they stand.

    Attributes:
        is_on: whether they stand there now.
    """

    def __init__(self, clock: Clock) -> None:
        self.is_on = False
        self._clock = clock
        self._is_possible = available()
        self._puts: list[Callable[[bool], None]] = []
        self._backward: list[BackwardHook] = []
        self._forward: list[ForwardHook] = []
        self._steps: list[StepHook] = []
        _alive.add(self)
        _watch_tracing()

    def begin(self) -> None:
        """Puts them into their places, in the thread that steps, unless something is compiled."""
        self.is_on = self._is_possible and not is_anything_compiled()
        self._put()

    def renew(self) -> None:
        """Takes them away until they begin anew, and counts from there."""
        self.is_on = False
        self._put()
        hooks: list[Any] = [*self._backward, *self._forward, *self._steps]
        for hook in hooks:
            hook.renew()

    def end(self) -> None:
        """Takes them away for good."""
        self._is_possible = self.is_on = False
        self._put()

    @property
    def backwards(self) -> int:
        """Backward passes that the hook in Python was not asked about."""
        return sum(hook.ran for hook in self._backward)

    @property
    def calls(self) -> int:
        """Calls of models likewise."""
        return sum(hook.ran for hook in self._forward)

    @property
    def steps(self) -> int:
        """Steps of optimizers likewise."""
        return sum(hook.ran for hook in self._steps)

    def stand_for_backward(self, owner: Any, original: Any, otherwise: Any) -> None:
        """For `owner.backward`, which is the hook in Python now."""
        if self._is_possible:
            from flatout.kernels._clock import BackwardHook

            hook = BackwardHook(self._clock, original, otherwise)
            update_wrapper(hook, original)
            self._backward.append(hook)
            self._add(_in_attribute(owner, "backward", otherwise, hook))

    def stand_for_call(
        self,
        owner: type,
        original: Any,
        otherwise: Any,
        known: dict[int, Any],
        is_grad_enabled: Callable[[], bool],
    ) -> None:
        """For `owner.__call__`, which is the hook in Python now.

        Args:
            owner: a class of models.
            original: its method.
            otherwise: the hook.
            known: a Called by the id of its model.
            is_grad_enabled: torch's.
        """
        if self._is_possible:
            from flatout.kernels._clock import ForwardHook

            hook = ForwardHook(self._clock, original, otherwise, known, is_grad_enabled)
            update_wrapper(hook, original)
            self._forward.append(hook)
            self._add(_in_attribute(owner, "__call__", otherwise, hook))

    def stand_for_steps(
        self, handles: tuple[Any, Any], begins: Any, ends: Any, attend: Callable[[], None]
    ) -> StepHook | None:
        """For the hooks that torch has given these handles; None where that cannot be.

        Args:
            handles: of the hook before an optimizer's step, and of that after it.
            begins, ends: those hooks.
            attend: called at the end of a step that is due.
        """
        if not self._is_possible:
            return None
        from flatout.kernels._clock import StepHook

        hook = StepHook(self._clock, begins, ends, attend)
        for handle, otherwise, quick in zip(
            handles, (begins, ends), (hook.begin, hook.end), strict=True
        ):
            self._add(_in_dict(handle.hooks_dict_ref(), handle.id, otherwise, quick))
        self._steps.append(hook)
        return hook

    def _add(self, put: Callable[[bool], None]) -> None:
        self._puts.append(put)
        put(self.is_on)

    def _put(self) -> None:
        for put in self._puts:
            put(self.is_on)


@cache
def _watch_tracing() -> None:
    """Takes all of them away before anything is traced."""

    def end_all() -> None:
        for quick in list(_alive):
            quick.end()

    def hook_into(module: Any) -> None:
        if not hasattr(module, "OutputGraph"):
            end_all()  # a torch of which nothing is known
            return
        owner = module.OutputGraph
        original = owner.__init__

        @wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            end_all()
            original(self, *args, **kwargs)

        owner.__init__ = init

    when_imported(_TRACER, hook_into)


def _in_attribute(owner: Any, name: str, otherwise: Any, quick: Any) -> Callable[[bool], None]:
    """Puts one hook into the place of the other, if it still has that place."""

    def put(is_quick: bool) -> None:
        old, new = (otherwise, quick) if is_quick else (quick, otherwise)
        if vars(owner).get(name) is old:
            setattr(owner, name, new)

    return put


def _in_dict(hooks: Any, key: Any, otherwise: Any, quick: Any) -> Callable[[bool], None]:
    """The same in a dict, which may be iterated over: it keeps its keys."""

    def put(is_quick: bool) -> None:
        old, new = (otherwise, quick) if is_quick else (quick, otherwise)
        if hooks.get(key) == old:  # methods, which are bound anew each time
            hooks[key] = new

    return put
