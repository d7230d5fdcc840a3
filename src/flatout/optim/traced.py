"""The updates of SGD, Adam and AdamW in plain operators, to be compiled with the rest of a step.

Numbers that a schedule may change are inputs: one float64 vector for each parameter group, so that
1 - beta keeps its digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Tensors = list[torch.Tensor]
Group = dict[str, Any]


class Kind(NamedTuple):
    """The update of optimizers of one class.

    Attributes:
        rates: returns the numbers of a parameter group that are inputs.
        facts: returns the options of a parameter group that decide its operators.
        states: returns the names in the state of each parameter, given the facts of its group.
        factors: returns factors that all parameters of a group share, given the rates, the facts,
            and the first parameter's state.
        update: returns a parameter and its state after a step, given `(parameter, gradient, state,
            rates, facts, factors)`.
    """

    rates: Callable[[Group], list[float]]
    facts: Callable[[Group], dict[str, bool]]
    states: Callable[[dict[str, bool]], tuple[str, ...]]
    factors: Callable[..., Tensors]
    update: Callable[..., tuple[torch.Tensor, Tensors]]


def kind_of(optimizer: torch.optim.Optimizer) -> Kind | None:
    """Return the update of the optimizer's class, or None if this module does not have it."""
    return _KINDS.get(type(optimizer))


def _adam_facts(group: Group, decoupled: bool = False) -> dict[str, bool]:
    return {
        "decays": bool(group["weight_decay"]),
        "decoupled": decoupled or bool(group.get("decoupled_weight_decay")),
        "amsgrad": bool(group["amsgrad"]),
        "maximize": bool(group["maximize"]),
    }


def _adam_states(facts: dict[str, bool]) -> tuple[str, ...]:
    largest = ("max_exp_avg_sq",) if facts["amsgrad"] else ()
    return ("step", "exp_avg", "exp_avg_sq", *largest)


def _adam_factors(rates: Tensors, _facts: dict[str, bool], state: Tensors) -> Tensors:
    lr, beta1, beta2, _, _ = rates
    step = state[0].double() + 1
    # Inductor computes powers again for each vector of weights, but exponentials once.
    first, second = (1 - (step * beta.log()).exp() for beta in (beta1, beta2))
    return [lr / first, second.sqrt()]


def _adam(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Tensors,
    rates: Tensors,
    facts: dict[str, bool],
    factors: Tensors,
) -> tuple[torch.Tensor, Tensors]:
    kind = parameter.dtype
    lr, beta1, beta2, eps, decay = rates
    step, mean, square, *largest = state
    gradient = -gradient if facts["maximize"] else gradient
    new = parameter
    if facts["decays"] and facts["decoupled"]:
        new = new - (lr * decay).to(kind) * new
    elif facts["decays"]:
        gradient = gradient + decay.to(kind) * new
    mean = mean + (1 - beta1).to(kind) * (gradient - mean)
    square = beta2.to(kind) * square + (1 - beta2).to(kind) * gradient * gradient
    largest = [torch.maximum(largest[0], square)] if facts["amsgrad"] else []
    size, root = (factor.to(kind) for factor in factors)
    new = new - size * mean / ((largest or [square])[0].sqrt() / root + eps.to(kind))
    return new, [step + 1, mean, square, *largest]


def _sgd_facts(group: Group) -> dict[str, bool]:
    return {
        "decays": bool(group["weight_decay"]),
        "momentum": bool(group["momentum"]),
        "nesterov": bool(group["nesterov"]),
        "maximize": bool(group["maximize"]),
    }


def _sgd(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Tensors,
    rates: Tensors,
    facts: dict[str, bool],
    _factors: Tensors,
) -> tuple[torch.Tensor, Tensors]:
    lr, momentum, dampening, decay = (rate.to(parameter.dtype) for rate in rates)
    gradient = -gradient if facts["maximize"] else gradient
    if facts["decays"]:
        gradient = gradient + decay * parameter
    if not facts["momentum"]:
        return parameter - lr * gradient, []
    buffer = momentum * state[0] + (1 - dampening) * gradient
    direction = gradient + momentum * buffer if facts["nesterov"] else buffer
    return parameter - lr * direction, [buffer]


def _adam_rates(group: Group) -> list[float]:
    return [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]


_ADAM = Kind(_adam_rates, _adam_facts, _adam_states, _adam_factors, _adam)
_KINDS: dict[type, Kind] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM._replace(facts=lambda group: _adam_facts(group, True)),
    torch.optim.SGD: Kind(
        lambda group: [group["lr"], group["momentum"], group["dampening"], group["weight_decay"]],
        _sgd_facts,
        lambda facts: ("momentum_buffer",) if facts["momentum"] else (),
        lambda rates, facts, state: [],
        _sgd,
    ),
}
