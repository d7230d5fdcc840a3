"""script.evaluation=no_grad: evaluates a model without building graphs for backward."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flatout.cures.record import leave, took
from flatout.cures.roots import Call, Cure
from flatout.cures.steps import ScriptSteps
from flatout.errors import ModelError
from flatout.hooks import unnumbered, wrap

if TYPE_CHECKING:
    from collections.abc import Iterator

FIELD = "script.evaluation"
# Number of first calls in eval mode after a step that build their graph, to detect if a backward
# pass uses the graph.
_WATCHED = 3


def without_graph(torch: Any, steps: ScriptSteps) -> Cure:
    """Remove graphs from calls of root modules in eval mode, after training in train mode.

    Some scripts differentiate the output of a model in eval mode. So the first calls after a step
    keep their graph. If a backward pass uses the graph, the script stays as written.
    """
    evaluated: dict[str, int] = {}

    def around(original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> None:
            try:
                original(*args, **kwargs)
            except RuntimeError as error:
                recent = [name for name, step in evaluated.items() if step == steps.count]
                if not recent or "does not require grad" not in str(error):
                    raise
                raise _refused(recent[0]) from error

        return backward

    wrap(torch.autograd, "backward", "cures", around)

    def cure(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Call:
        return _Evaluated(torch, steps, type(module).__name__, call, evaluated)

    return cure


class _Evaluated:
    """Wrapped calls of one module."""

    def __init__(
        self, torch: Any, steps: ScriptSteps, name: str, call: Call, evaluated: dict[str, int]
    ) -> None:
        self._torch = torch
        self._steps = steps
        self._name = name
        self._call = call
        self._evaluated = evaluated
        self._is_trained = False
        self._is_needed = False
        self._is_sure = False
        self._step = -1
        self._watched = 0

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self._torch.is_grad_enabled():
            return self._call(module, *args, **kwargs)
        if module.training:
            self._is_trained = True
            return self._call(module, *args, **kwargs)
        if not self._is_trained or self._is_needed or self._wants_gradient(args, kwargs):
            return self._call(module, *args, **kwargs)
        count = self._steps.count
        if count != self._step:
            # Steps have passed since the first evaluation, and no backward used its graph.
            self._is_sure = self._is_sure or self._watched > 0
            self._step = count
        if not self._is_sure and self._watched < _WATCHED:
            self._watched += 1
            return self._watch(self._call(module, *args, **kwargs))
        took(FIELD, f"{self._name} is evaluated without a graph")
        self._evaluated[self._name] = count
        with self._torch.no_grad(), _same_kernels(self._torch):
            return self._call(module, *args, **kwargs)

    def _wants_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        from torch.utils._pytree import tree_leaves

        tensor = self._torch.Tensor
        return any(
            leaf.requires_grad for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, tensor)
        )

    def _watch(self, output: Any) -> Any:
        from torch.utils._pytree import tree_leaves

        for leaf in tree_leaves(output):
            if isinstance(leaf, self._torch.Tensor) and leaf.requires_grad:
                unnumbered(leaf.register_hook(self._used))
        return output

    def _used(self, gradient: Any) -> None:
        self._is_needed = True
        if self._evaluated.get(self._name) == self._steps.count:
            raise _refused(self._name)
        leave(FIELD, f"the script differentiates what {self._name} computes in eval mode")


def _refused(name: str) -> ModelError:
    return ModelError(
        f"the script calls backward on what {name} computed in eval mode, where "
        "script.evaluation=no_grad leaves no graph",
        do="drop script.evaluation from the Recipe: this script needs the graph there",
    )


@contextmanager
def _same_kernels(torch: Any) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
