"""A Keras optimizer as one of torch's: Keras' formulas, on Keras' own variables.

The state stays where Keras keeps it, so a `.keras` file, a learning-rate callback and Keras itself
see every step. Without fusing, a step is Keras' own `apply`. Fused, Adam and AdamW run torch's
fused kernel, which differs from Keras only in where epsilon stands:

    torch   p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    Keras   p -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)

Both agree where torch is given eps / sqrt(1 - b2^t), which is what each step does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flatout.data import code_digest, is_library

Tensors = list[torch.Tensor]
# Attributes of Keras' optimizers that its `get_config` has too.
_OPTIONS = (
    "weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "ema_momentum",
    "ema_overwrite_frequency", "loss_scale_factor", "gradient_accumulation_steps", "beta_1",
    "beta_2", "epsilon", "amsgrad", "momentum", "nesterov", "rho", "centered",
)  # fmt: skip


class KerasOptimizer(torch.optim.Optimizer):
    """Steps a Keras optimizer, built over `variables`.

    Args:
        optimizer: a `keras.optimizers.Optimizer`; it is built if it is not yet.
        variables: the model's trainable variables.

    Attributes:
        keras: the user's own optimizer object.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        if not optimizer.built:
            optimizer.build(list(variables))
        self.keras = optimizer
        self._variables = list(variables)
        self._parameters: Tensors = [v._value for v in variables]
        kind = type(optimizer)
        super().__init__(self._parameters, {"lr": self._rate(), "kind": kind.__qualname__})
        self._count = torch.zeros((), device=self._parameters[0].device)

    def drives(self, optimizer: Any, variables: Sequence[Any]) -> bool:
        """Whether this is that optimizer over these variables: `compile` may have come between."""
        return optimizer is self.keras and [*map(id, variables)] == [*map(id, self._variables)]

    @property
    def can_be_fused(self) -> bool:
        """Whether torch's kernel computes what this optimizer does: a plain Adam or AdamW."""
        optimizer, variables = self.keras, self._variables
        names = {cls.__name__ for cls in type(optimizer).__mro__}
        return (
            type(optimizer).__module__.startswith("keras.")
            and "Adam" in names
            and not names & {"Nadam", "Adamax", "LossScaleOptimizer"}
            and not (optimizer.gradient_accumulation_steps or optimizer.use_ema)
            and optimizer.loss_scale_factor is None
            and len({(p.device, p.dtype) for p in self._parameters}) == 1
            and all(p.is_floating_point() for p in self._parameters)
            and not any(v.constraint is not None for v in variables)
            and not any(getattr(v, "overwrite_with_gradient", False) for v in variables)
        )

    @contextmanager
    def scaled(self, factor: float) -> Iterator[None]:
        """Multiply the learning rate, be it a number or a schedule, while this lasts."""
        inner = self._inner
        given = inner._learning_rate
        rate = torch.tensor(self._rate() * factor, dtype=torch.float32)
        # Past Keras' `__setattr__`, which would take it for a new piece of state.
        vars(inner)["_learning_rate"] = rate
        try:
            yield
        finally:
            vars(inner)["_learning_rate"] = given
            self.param_groups[0]["lr"] = self._rate()

    @property
    def is_scheduled(self) -> bool:
        """Whether the learning rate is Keras' to change: a schedule, or a function."""
        return not hasattr(self._inner._learning_rate, "assign")

    @property
    def batches_per_update(self) -> int:
        """How many batches Keras puts together for one change of the weights."""
        return int(self._inner.gradient_accumulation_steps or 1)

    @property
    def _inner(self) -> Any:
        """The optimizer that has the learning rate; one that scales losses wraps it."""
        return getattr(self.keras, "inner_optimizer", self.keras)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply the parameters' gradients.

        Raises:
            ValueError: no parameter has a gradient.
        """
        gradients = [p.grad for p in self._parameters]
        group = self.param_groups[0]
        group["lr"] = self._rate()
        complete = [g for g in gradients if g is not None]
        if group.get("fused") and len(complete) == len(gradients):
            self._step_fused(complete, group["lr"])
        else:
            with _unscaled(self.keras, complete):
                self.keras.apply(gradients, self._variables)

    def _step_fused(self, gradients: Tensors, rate: float) -> None:
        optimizer = self.keras
        number = int(optimizer._iterations.value) + 1
        correction = math.sqrt(1 - optimizer.beta_2**number)
        gradients = optimizer._clip_gradients(gradients)
        optimizer._apply_weight_decay(self._variables)
        flag = getattr(self, "found_inf", None)  # set on a device that holds bad steps back
        self._count.fill_(number)
        torch._fused_adam_(
            self._parameters,
            gradients,
            self._states(optimizer._momentums),
            self._states(optimizer._velocities),
            self._states(optimizer._velocity_hats) if optimizer.amsgrad else [],
            [self._count] * len(gradients),
            lr=rate,
            beta1=optimizer.beta_1,
            beta2=optimizer.beta_2,
            weight_decay=0.0,
            eps=optimizer.epsilon / correction,
            amsgrad=bool(optimizer.amsgrad),
            maximize=False,
            found_inf=flag,
        )
        optimizer._iterations.value.add_(1 if flag is None else (1 - flag).to(torch.int64))

    def _states(self, states: Sequence[Any]) -> Tensors:
        """Those of the variables that are stepped: Keras may have been built over more."""
        index = self.keras._get_variable_index
        return [states[index(variable)].value for variable in self._variables]

    def _rate(self) -> float:
        return float(self._inner._get_current_learning_rate())

    def options(self) -> dict[str, Any]:
        """What the Keras optimizer was made with, as plain values by dotted name."""
        try:
            config = self.keras.get_config()
        except NotImplementedError:  # a schedule of the user's that only runs
            config = {k: v for k, v in vars(self.keras).items() if k in _OPTIONS}
        found = dict(_flat(config))
        if self.is_scheduled:
            schedule = self._inner._learning_rate
            found["learning_rate.class_name"] = type(schedule).__qualname__
            if not is_library(type(schedule)):
                found["learning_rate.code"] = code_digest(schedule)[:8]
        return found

    def take_rate(self, rate: float) -> None:
        """Go on with another learning rate than the one that was loaded."""
        self._inner._learning_rate.assign(rate)
        self.param_groups[0]["lr"] = self._rate()

    @contextmanager
    def own_rate(self) -> Iterator[None]:
        """Afterwards the rate is what it was, or a schedule begins, whatever state was loaded."""
        keras, rate = self.keras, float(self.keras._get_current_learning_rate())
        yield
        if hasattr(keras._learning_rate, "assign"):
            keras._learning_rate.assign(rate)
        else:  # a schedule, which counts by the optimizer's steps
            keras._iterations.assign(0)

    def state_dict(self) -> dict[str, Any]:
        """Every variable of the Keras optimizer, in its order; the tensors themselves."""
        options = {k: v for k, v in self.param_groups[0].items() if k != "params"}
        options["lr"] = self._rate()  # which a callback may have set since the last step
        state = {
            number: {"value": variable.value.detach()}
            for number, variable in enumerate(self._state_variables())
        }
        return {
            "state": state,
            "param_groups": [{**options, "params": list(range(len(self._parameters)))}],
        }

    def _state_variables(self) -> list[Any]:
        """Also what Keras does not list: Nadam's running product of momenta."""
        listed: list[Any] = self.keras.variables
        known = {id(variable) for variable in listed}
        kind = type(listed[0])
        return listed + [
            value
            for value in vars(self.keras).values()
            if isinstance(value, kind) and id(value) not in known
        ]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` gave, into the same variables.

        Raises:
            ValueError: the state is of another optimizer.
        """
        variables, saved = self._state_variables(), state_dict["state"]
        if len(saved) != len(variables):
            raise ValueError(
                f"the state has {len(saved)} variables, {self.keras.name} has {len(variables)}"
            )
        for number, variable in enumerate(variables):
            variable.value.copy_(saved[number]["value"])
        (options,) = state_dict["param_groups"]
        self.param_groups[0].update({k: v for k, v in options.items() if k != "params"})


@contextmanager
def _unscaled(optimizer: Any, gradients: Tensors) -> Iterator[None]:
    """Keras divides gradients by the scale of the loss; here the loss was not multiplied by it."""
    factor = optimizer.loss_scale_factor
    if hasattr(optimizer, "dynamic_scale"):  # LossScaleOptimizer, which also watches for overflow
        torch._foreach_mul_(gradients, optimizer.dynamic_scale.value)
    elif factor is not None:
        optimizer.loss_scale_factor = None
    try:
        yield
    finally:
        optimizer.loss_scale_factor = factor


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values in a Keras configuration; what things are called tells nothing."""
    if isinstance(value, dict):
        for key, one in value.items():
            if key not in ("name", "registered_name", "module"):
                path = name if key == "config" else f"{name}.{key}".lstrip(".")
                yield from _flat(one, path)
    else:
        plain = isinstance(value, (bool, int, float, str, type(None)))
        yield name, value if plain else str(value)
