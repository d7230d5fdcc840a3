"""Optimizers with a rule by row: rows of a table that a batch has not used stay as they are.

Their results differ from those of dense optimizers, whose moments continue to move unused rows.
Dense and sparse gradients give the same result. With sparse gradients, a step's cost grows with the
rows of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flatout.errors import ModelError

State = dict[str, torch.Tensor]


class ParameterRows(NamedTuple):
    """Rows of a parameter that a rule steps in place.

    Attributes:
        weights: tensor of shape (rows, ...).
        gradients: tensor of the same shape.
        state: state tensors with the same number of rows, by name.
        group: the optimizer's options for the parameter.
        number: number of this step, from 1.
    """

    weights: torch.Tensor
    gradients: torch.Tensor
    state: State
    group: dict[str, Any]
    number: int


class ByRow(torch.optim.Optimizer):
    """Base of optimizers that step only the rows of a gradient, even without `sparse=True`.

    A rule gets weights, gradients and state of the same rows, and changes weights and state. It
    must leave rows whose gradient is zero as they are.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        kept = self.state[parameter]
        if not kept:
            kept["step"] = torch.zeros((), dtype=torch.float32)
            kept.update(self._begin(parameter, group))
        kept["step"] += 1
        state = {name: tensor for name, tensor in kept.items() if name != "step"}
        number = int(kept["step"])
        if not gradient.is_sparse:
            self._apply(ParameterRows(parameter, gradient, state, group, number))
            return
        gradient = gradient.coalesce()
        rows = gradient.indices()[0]
        weights = parameter.index_select(0, rows)
        own = {name: tensor.index_select(0, rows) for name, tensor in state.items()}
        self._apply(ParameterRows(weights, gradient.values(), own, group, number))
        parameter.index_copy_(0, rows, weights)
        for name, tensor in state.items():
            tensor.index_copy_(0, rows, own[name])

    def _begin(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        raise NotImplementedError

    def _apply(self, rows: ParameterRows) -> None:
        raise NotImplementedError


class LazyAdam(ByRow):
    """Adam in which rows whose gradient is zero keep weights and moments (torch's SparseAdam).

    In addition to tables it steps all other parameters. It steps parameters of one dimension as
    Adam does.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay rates of the first and second moments.
        eps: added to the square root of the second moment.

    Raises:
        ModelError: for a value out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ModelError(
                "LazyAdam takes lr >= 0, eps >= 0 and betas from 0 to below 1, found "
                f"lr={lr} eps={eps} betas={betas}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def _begin(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        return {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}

    def _apply(self, rows: ParameterRows) -> None:
        weights, gradients, state, group, number = rows
        beta1, beta2 = group["betas"]
        mean, squares = state["exp_avg"], state["exp_avg_sq"]
        used: Any = 1.0
        if gradients.dim() > 1:
            used = (gradients.flatten(1) != 0).any(1).to(weights.dtype)
            used = used.reshape(-1, *[1] * (gradients.dim() - 1))
        mean += (1 - beta1) * used * (gradients - mean)
        squares += (1 - beta2) * used * (gradients.square() - squares)
        root = (squares / (1 - beta2**number)).sqrt_().add_(group["eps"])
        weights -= group["lr"] / (1 - beta1**number) * used * mean / root


class RowwiseAdagrad(ByRow):
    """Adagrad with one sum for each row of a matrix, so that its state has one column.

    `sum += mean(g * g)` over the row, `w -= lr * g / (sqrt(sum) + eps)`, as in FBGEMM. Parameters
    of one dimension have a sum for each element.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        eps: added to the square root of the sum.
        initial_accumulator_value: initial value of the sums.

    Raises:
        ModelError: for a value out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and initial_accumulator_value >= 0):
            raise ModelError(
                "RowwiseAdagrad takes lr, eps and initial_accumulator_value from 0 on, found "
                f"lr={lr} eps={eps} initial_accumulator_value={initial_accumulator_value}"
            )
        options = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, options)

    def _begin(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        shape = parameter.shape[:1] + (1,) * (parameter.dim() - 1)
        return {"sum": parameter.new_full(shape, group["initial_accumulator_value"])}

    def _apply(self, rows: ParameterRows) -> None:
        weights, gradients, state, group, _ = rows
        squares = gradients.square()
        if gradients.dim() > 1:
            squares = squares.mean(tuple(range(1, gradients.dim())), keepdim=True)
        state["sum"] += squares
        moved = group["lr"] * gradients / (state["sum"].sqrt() + group["eps"])
        weights -= torch.where(gradients == 0, 0.0, moved)


class Ftrl(ByRow):
    """FTRL-proximal (McMahan et al. 2013), whose L1 sets unimportant weights to zero.

    For the weights of a linear part. A weight's first gradient removes most of its initial value.
    For each element, with n the sum of squared gradients:

        s = (sqrt(n + g * g) - sqrt(n)) / lr
        z += g - s * w,  n += g * g
        w = 0 where |z| <= l1, else -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)

    Args:
        params: parameters, or groups of them.
        lr: learning rate (alpha).
        beta: added to sqrt(n), keeps the first steps small.
        l1: strength of L1.
        l2: strength of L2.

    Raises:
        ModelError: for a value out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
    ) -> None:
        if not (lr > 0 and beta >= 0 and l1 >= 0 and l2 >= 0):
            raise ModelError(
                "Ftrl takes lr > 0 and beta, l1 and l2 from 0 on, found "
                f"lr={lr} beta={beta} l1={l1} l2={l2}"
            )
        super().__init__(params, {"lr": lr, "beta": beta, "l1": l1, "l2": l2})

    def _begin(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        return {name: torch.zeros_like(parameter) for name in ("z", "n")}

    def _apply(self, rows: ParameterRows) -> None:
        weights, gradients, state, group, _ = rows
        z, n = state["z"], state["n"]
        before = n.sqrt()
        n += gradients.square()
        root = n.sqrt()
        z += gradients - (root - before) / group["lr"] * weights
        shrunk = z.sign() * (z.abs() - group["l1"]).clamp_min(0.0)
        fresh = -shrunk / ((group["beta"] + root) / group["lr"] + group["l2"])
        weights.copy_(torch.where(gradients == 0, weights, fresh))
