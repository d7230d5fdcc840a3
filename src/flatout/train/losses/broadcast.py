"""Detection of losses and metrics that compare each output with every target: (n, 1) with (n,)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from flatout.data import Batch, tensors_in
from flatout.errors import ModelError
from flatout.models import left_before_compiled

# Advice for an output of shape (n, 1) and a target of shape (n,), or for these shapes exchanged.
ONE_SHAPE = (
    "give output and target one shape: .squeeze(1) takes the 1 out of (n, 1), .unsqueeze(1) adds it"
)
# Functions that need equal shapes, but broadcast unequal shapes with at most a warning.
_ONE_SHAPE = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.poisson_nll_loss,
    F.hinge_embedding_loss,
)
_T = TypeVar("_T")


@contextmanager
def no_broadcast(name: str, output: object, batch: Batch) -> Iterator[None]:
    """Refuse functions of outputs and targets in this context that match rows with other axes.

    Compiled functions run uncompiled meanwhile.
    """
    with uncompiled(), _Watch(name, output, batch):
        yield


@contextmanager
def no_broadcast_within(batch: Batch) -> Iterator[None]:
    """Refuse values made of parameters in this context that match target rows with other axes."""
    with uncompiled(), _WatchCompute(batch):
        yield


def watched(compute: Callable[[Batch], _T]) -> Callable[[Batch], _T]:
    """Return the same function with a check for broadcasting, for use in a step.

    The check ends before the first call of compiled code, because that code would round differently
    under the check.
    """

    def within(batch: Batch) -> _T:
        with left_before_compiled(_WatchCompute(batch)):
            return compute(batch)

    within.__wrapped__ = compute  # type: ignore[attr-defined]
    return within


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled functions eagerly, so that the check sees their operations.

    If Dynamo is not loaded, no function is compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class _Watch(TorchFunctionMode):
    """Follows values made of outputs and targets, row by row, and checks shapes where they meet."""

    def __init__(self, name: str, output: object, batch: Batch) -> None:
        super().__init__()
        self._name = name
        self._rows = {batch.size, batch.samples} - {0, 1}
        self._outputs = tensors_in(output)
        self._targets = tensors_in(batch.targets)
        # Watched tensors by id. They are kept alive, so that no other tensor gets the same id.
        self._of_output = {id(tensor): tensor for tensor in self._outputs}
        self._of_target = {id(tensor): tensor for tensor in self._targets}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = tensors_in((*args, *(kwargs or {}).values()))
        outputs = [tensor for tensor in given if id(tensor) in self._of_output]
        targets = [tensor for tensor in given if id(tensor) in self._of_target]
        pairs = [(o, t) for o in outputs for t in targets if self._differ(o, t)]
        if pairs and func in _ONE_SHAPE:
            raise self._error(*pairs[0])
        result = func(*args, **(kwargs or {}))
        for output, target in pairs:
            if self._has_matched(output, target, result):
                raise self._error(output, target)
        if isinstance(result, torch.Tensor) and bool(outputs) != bool(targets):
            self._follow(result, outputs, targets)
        return result

    def _follow(
        self, result: torch.Tensor, outputs: list[torch.Tensor], targets: list[torch.Tensor]
    ) -> None:
        deepest = max(tensor.dim() for tensor in outputs or targets)
        if self._has_rows(result) and result.dim() <= deepest:
            (self._of_output if outputs else self._of_target)[id(result)] = result

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] in self._rows

    def _differ(self, output: torch.Tensor, target: torch.Tensor) -> bool:
        return output.shape != target.shape and self._has_rows(output) and self._has_rows(target)

    def _has_matched(self, output: torch.Tensor, target: torch.Tensor, result: object) -> bool:
        if output.dim() == target.dim() or not isinstance(result, torch.Tensor):
            return False
        try:
            whole = torch.broadcast_shapes(output.shape, target.shape)  # type: ignore[no-untyped-call]
        except RuntimeError:
            return False
        if result.shape != whole:
            return False
        # If there are as many rows as classes, for example, the broadcast shape equals that of one
        # tensor. Then it counts only for the original output and target.
        larger = whole not in (output.shape, target.shape)
        return larger or (_is_in(output, self._outputs) and _is_in(target, self._targets))

    def _error(self, output: torch.Tensor, target: torch.Tensor) -> ModelError:
        ours, theirs = tuple(output.shape), tuple(target.shape)
        whole = ", ".join(str(tuple(t.shape)) for t in self._outputs)
        wanted = ", ".join(str(tuple(t.shape)) for t in self._targets)
        return ModelError(
            f"{self._name} would compare each output with every target: output {ours} and target "
            f"{theirs} differ in shape and broadcast",
            where=f"the model returns {whole}, the targets are {wanted}" if whole else None,
            do=f"{ONE_SHAPE}; where all with all is meant, say so by .expand() or a new dimension",
        )


class _WatchCompute(_Watch):
    """Treats values made of parameters, and results of modules, as outputs."""

    def __init__(self, batch: Batch) -> None:
        super().__init__("compute", (), batch)
        if batch.targets is None:  # targets may be among the inputs
            self._of_target = {id(tensor): tensor for tensor in tensors_in(batch.inputs)}

    def __enter__(self) -> Any:
        self._hook = register_module_forward_hook(lambda module, args, output: self._keep(output))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        self._hook.remove()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _keep(self, output: object) -> None:
        rows = [tensor for tensor in tensors_in(output) if self._has_rows(tensor)]
        self._of_output |= {id(t): t for t in rows if id(t) not in self._of_target}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = tensors_in((*args, *(kwargs or {}).values()))
        if func in _ONE_SHAPE and len(given) > 1 and self._would_broadcast(*given[:2]):
            ours, theirs = (tuple(tensor.shape) for tensor in given[:2])
            raise ModelError(
                f"{func.__name__} would compare each output with every target: {ours} and "
                f"{theirs} differ in shape and broadcast",
                do=ONE_SHAPE,
            )
        result = super().__torch_function__(func, types, args, kwargs)
        if any(tensor.is_leaf and tensor.requires_grad for tensor in given):
            for tensor in tensors_in(result):
                self._of_target.pop(id(tensor), None)
            self._keep(result)
        return result

    def _would_broadcast(self, tensor: torch.Tensor, other: torch.Tensor) -> bool:
        if tensor.dim() == other.dim() or not (self._has_rows(tensor) and self._has_rows(other)):
            return False
        try:
            whole = torch.broadcast_shapes(tensor.shape, other.shape)  # type: ignore[no-untyped-call]
        except RuntimeError:
            return False  # torch's own error is clearer
        return whole not in (tensor.shape, other.shape)


def _is_in(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(tensor is one for one in tensors)
