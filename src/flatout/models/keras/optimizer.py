"""A Keras optimizer as a torch optimizer, with Keras' formulas on Keras' own variables.

The state stays in Keras' variables, so that a `.keras` file, a learning-rate callback and Keras
itself see every step. Without fusing, a step is Keras' own `apply`. With fusing, Adam and AdamW run
torch's fused kernel. It differs from Keras only in the position of epsilon:

    torch   p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    Keras   p -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)

Both agree if torch gets eps / sqrt(1 - b2^t), so each step passes this value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from flatout.data import code_digest, is_library
from flatout.errors import ModelError
from flatout.models.keras.build_again import build_again
from flatout.models.keras.row_rule import ROW_RULES, KerasRule
from flatout.models.keras.tables import set_shape

Tensors = list[torch.Tensor]
# Attributes of Keras' optimizers that are also in their `get_config`.
_OPTIONS = (
    "weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "ema_momentum",
    "ema_overwrite_frequency", "loss_scale_factor", "gradient_accumulation_steps", "beta_1",
    "beta_2", "epsilon", "amsgrad", "momentum", "nesterov", "rho", "centered",
)  # fmt: skip

# Options that no kernel supports, or under which the missed steps of a table row depend on more
# than the row's state.
_ALL_ROWS = ("amsgrad", "centered", "use_ema", "gradient_accumulation_steps")

# Optimizers that step each element independently, unless an option of _ALL_ELEMENTS is set.
_ELEMENTWISE = {
    "SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Ftrl", "Lion",
}  # fmt: skip
_ALL_ELEMENTS = ("clipnorm", "global_clipnorm", "use_ema")

# Names of lists of variables that do not hold the state of a model variable.
_NOT_STATE = ("_variables", "_trainable_variables")


class KerasOptimizer(torch.optim.Optimizer):
    """Steps a Keras optimizer, built over `variables`.

    Has the interface of `TorchOptimizer` in `flatout.optim`.

    Args:
        optimizer: a `keras.optimizers.Optimizer`. It is built if necessary, and built again if it
            does not know some of the variables.
        variables: the model's trainable variables.

    Attributes:
        keras: the user's own optimizer object.
        by_rows: tables of which only the rows that a batch has used are stepped, by other code.
    """

    averages_state = False
    clips_itself = True
    rate_names = ("learning_rate", "inner_optimizer.learning_rate")

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        if not optimizer.built:
            optimizer.build(list(variables))
        elif {*map(id, variables)} - {*map(id, optimizer._trainable_variables)}:
            build_again(optimizer, variables)
        self.keras = optimizer
        self.by_rows: set[torch.Tensor] = set()
        self._is_clipped = False  # whether `clip_rows` has clipped the present gradients
        self._variables = list(variables)
        # Ids of variables that do not train yet, which Keras does not know.
        self._late: set[int] = set()
        self._places: dict[int, int] = {}
        self._parameters: Tensors = [v._value for v in variables]
        kind = type(optimizer)
        super().__init__(self._parameters, {"lr": self._rate(), "kind": kind.__qualname__})
        self._count = torch.zeros((), device=self._parameters[0].device)

    @property
    def given(self) -> Any:
        """The user's own optimizer object."""
        return self.keras

    def second(self, parameters: Sequence[Sequence[torch.Tensor]]) -> KerasOptimizer:
        """Return an optimizer of the same class and options, without state.

        Args:
            parameters: the parameters of each group.
        """
        # keeps a schedule, or a function of the user's own, out of the configuration
        with self.scaled(1.0):
            config = self.keras.get_config()
        variable = type(self._variables[0])
        values = [value for own in parameters for value in own]
        made = [variable(value, dtype=str(value.dtype)[6:], name="like") for value in values]
        return KerasOptimizer(type(self.keras).from_config(config), made)

    def scaler(self, device: str) -> torch.amp.GradScaler | None:
        """Return a scaler that scales the loss as Keras does under mixed_float16, else None.

        Args:
            device: type of the loss' device.
        """
        is_half = any(p.dtype is torch.float16 for p in self._parameters)
        scales = hasattr(self.keras, "dynamic_scale") and not is_half
        return _Scaler(self.keras, device) if scales else None

    def drives(self, optimizer: Any, variables: Sequence[Any]) -> bool:
        """Return whether this wraps that optimizer over these variables."""
        driven = {*map(id, self._variables)}
        return optimizer is self.keras and {*map(id, variables)} == driven and not self._late

    def hold(
        self, values: Sequence[torch.Tensor], model: Any, lr: float | None, scheduler: Any = None
    ) -> None:
        """Take over variables that do not train yet. Once they train, `begin` passes them to Keras.

        Args:
            values: the parameters that hold the variables' values.
            model: the model of the variables, whose order decides their order.
            lr: the learning rate of these variables while the optimizer's rate is as compiled. It
                changes in proportion to the optimizer's rate, by a schedule or callbacks. None for
                the optimizer's own rate.
            scheduler: None, because the optimizer has its own schedule.

        Raises:
            ModelError: the optimizer's rate begins at 0, so no rate is a multiple of it.
        """
        moved = {*map(id, values)}
        late = [variable for variable in model.weights if id(variable._value) in moved]
        self._late |= {id(variable) for variable in late} - {*map(id, self._variables)}
        self._places = {id(variable): place for place, variable in enumerate(model.weights)}
        by_value = {id(variable._value): variable for variable in (*self._variables, *late)}
        groups = self.param_groups
        if lr is None:
            grouped = {id(p) for group in groups for p in group["params"]}
            groups[0]["params"] += [v._value for v in late if id(v._value) not in grouped]
        else:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) not in moved]
            own = {k: v for k, v in groups[0].items() if k not in ("params", "factor")}
            factor = {"factor": lr / self._base_rate()}
            self.add_param_group({**own, **factor, "params": [v._value for v in late]})
        for group in groups:
            group["params"].sort(key=lambda p: self._places.get(id(by_value[id(p)]), 0))
        self._parameters = [p for group in groups for p in group["params"]]
        self._variables = [by_value[id(p)] for p in self._parameters]

    def begin(self) -> None:
        """Pass the held variables that have begun to train to Keras."""
        started = [v for v in self._variables if id(v) in self._late and v.trainable]
        if started:
            self._start(started)

    def _start(self, started: Sequence[Any]) -> None:
        self._late -= {*map(id, started)}
        known = [v for v in self._variables if id(v) not in self._late]
        build_again(self.keras, sorted(known, key=lambda v: self._places.get(id(v), 0)))

    def _base_rate(self) -> float:
        schedule = self._inner._learning_rate
        rate = getattr(schedule, "warmup_target", None) or self._rate()
        if not rate:
            raise ModelError(
                f"the learning rate of {self.keras.name} begins at 0, so that no other rate can be "
                "a multiple of it",
                do="leave out lr of Unfreeze, or begin with a rate above 0",
            )
        return float(rate)

    def _parts(self) -> Iterator[tuple[float, list[Any]]]:
        variables = iter(self._variables)
        for group in self.param_groups:
            own = [next(variables) for _ in group["params"]]
            own = [variable for variable in own if id(variable) not in self._late]
            if own := [variable for variable in own if variable._value not in self.by_rows]:
                yield group.get("factor", 1.0), own

    @property
    def can_be_fused(self) -> bool:
        """True if torch's fused kernel can compute this optimizer's steps: a plain Adam or AdamW.

        False if the kernel is in use already, or was refused.
        """
        optimizer, variables = self.keras, self._variables
        names = {cls.__name__ for cls in type(optimizer).__mro__}
        return (
            self.param_groups[0].get("fused") is None
            and type(optimizer).__module__.startswith("keras.")
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
        """Within this context, multiply the learning rate (a number or a schedule) by a factor."""
        inner = self._inner
        given = inner._learning_rate
        rate = torch.tensor(self._rate() * factor, dtype=torch.float32)
        # Bypasses Keras' `__setattr__`, which would register the rate as state.
        vars(inner)["_learning_rate"] = rate
        try:
            yield
        finally:
            vars(inner)["_learning_rate"] = given
            self._show_rates()

    @property
    def is_scheduled(self) -> bool:
        """True if Keras changes the learning rate by itself: by a schedule, or a function."""
        return not hasattr(self._inner._learning_rate, "assign")

    @property
    def batches_per_update(self) -> int:
        """Number of batches whose gradients Keras accumulates for one update."""
        return int(self._inner.gradient_accumulation_steps or 1)

    @property
    def _inner(self) -> Any:
        return getattr(self.keras, "inner_optimizer", self.keras)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply the parameters' gradients.

        Raises:
            ValueError: no parameter has a gradient.
        """
        parts = list(self._parts())
        variables = [variable for _, part in parts for variable in part]
        gradients = [variable._value.grad for variable in variables]
        self._show_rates()
        is_clipped, self._is_clipped = self._is_clipped, False
        complete = [g for g in gradients if g is not None]
        if self.by_rows and not complete:  # only tables had gradients
            self.keras._iterations.value.add_(1)
            return
        with _unclipped(self.keras) if is_clipped else nullcontext():
            if self.param_groups[0].get("fused") and len(complete) == len(gradients):
                self._step_fused(complete, parts)
            else:
                with _unscaled(self.keras), self._own_rates(parts):
                    self.keras.apply(gradients, variables)

    def _step_fused(self, gradients: Tensors, parts: Sequence[tuple[float, list[Any]]]) -> None:
        optimizer = self.keras
        number = int(optimizer._iterations.value) + 1
        correction = math.sqrt(1 - optimizer.beta_2**number)
        gradients = optimizer._clip_gradients(gradients)
        flag = getattr(self, "found_inf", None)  # set if bad steps are skipped on the device
        self._count.fill_(number)
        for factor, variables in parts:
            with self._multiplied(factor):
                optimizer._apply_weight_decay(variables)
                rate = self._rate()
            own, gradients = gradients[: len(variables)], gradients[len(variables) :]
            torch._fused_adam_(
                [variable._value for variable in variables],
                own,
                self._states(variables, optimizer._momentums),
                self._states(variables, optimizer._velocities),
                self._states(variables, optimizer._velocity_hats) if optimizer.amsgrad else [],
                [self._count] * len(own),
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

    def why_all_rows(self, group: Mapping[str, Any]) -> str:
        """Return the reason why a parameter group cannot step single rows of a table, or ""."""
        kind = type(self.keras)
        if kind.__name__ not in ROW_RULES or not kind.__module__.startswith("keras."):
            return f"{kind.__name__} steps all rows"
        asked = [name for name in _ALL_ROWS if getattr(self.keras, name, None)]
        return f"{asked[0]} steps all rows" if asked else ""

    def row_rule(self, group: dict[str, Any], weight: nn.Parameter) -> KerasRule:
        """Return the rule by which the optimizer steps rows of a table (see `why_all_rows`)."""
        return KerasRule(self, group, weight)

    def decays(self, weight: torch.Tensor) -> bool:
        """Return whether the optimizer's weight decay applies to the variable of this value."""
        keras = self.keras
        return keras.weight_decay is not None and keras._use_weight_decay(self._variable(weight))

    def slot(self, weight: torch.Tensor, name: str | None) -> Any:
        """Return the state tensor of a variable in Keras' list of this name, or None."""
        slots = getattr(self.keras, name) if name else []
        return (
            slots[self.keras._get_variable_index(self._variable(weight))]._value if slots else None
        )

    def _variable(self, weight: torch.Tensor) -> Any:
        return next(variable for variable in self._variables if variable._value is weight)

    def rate_of(self, group: dict[str, Any]) -> float:
        """Return the present learning rate of a parameter group."""
        return self._rate() * float(group.get("factor", 1.0))

    def clip_rows(self, weights: Sequence[torch.Tensor]) -> None:
        """Clip all gradients as Keras does; of sparse gradients of tables, clip the present rows.

        Args:
            weights: tables whose gradients are sparse and coalesced.
        """
        keras = self.keras
        if not weights or not (keras.clipnorm or keras.global_clipnorm or keras.clipvalue):
            return
        whole = [variable._value.grad for _, part in self._parts() for variable in part]
        gradients = [w.grad._values() for w in weights if w.grad is not None]
        gradients += [gradient for gradient in whole if gradient is not None]
        torch._foreach_copy_(gradients, keras._clip_gradients(gradients))
        self._is_clipped = True

    def _states(self, variables: Sequence[Any], states: Sequence[Any]) -> Tensors:
        index = self.keras._get_variable_index
        return [states[index(variable)].value for variable in variables]

    def _show_rates(self) -> None:
        """Write the present rate into the parameter groups, where other code may read it."""
        rate = self._rate()
        for group in self.param_groups:
            group["lr"] = rate * group.get("factor", 1.0)

    def _multiplied(self, factor: float) -> AbstractContextManager[None]:
        return nullcontext() if factor == 1 else self.scaled(factor)

    @contextmanager
    def _own_rates(self, parts: Sequence[tuple[float, list[Any]]]) -> Iterator[None]:
        if all(factor == 1 for factor, _ in parts):
            yield
            return
        inner = self._inner
        update, decay = inner._backend_update_step, inner._apply_weight_decay
        factors = {id(variable): factor for factor, part in parts for variable in part}
        # These are values such as Nadam's product of momenta, which each step multiplies only once.
        shared = [var for var in vars(inner).values() if hasattr(var, "assign")]

        def updated(gradients: Tensors, variables: Sequence[Any], _rate: Any) -> None:
            before = [item.value.clone() for item in shared]
            pairs = list(zip(gradients, variables, strict=True))
            for factor in dict.fromkeys(factors.values()):
                own = [(g, v) for g, v in pairs if factors[id(v)] == factor]
                if own:
                    for item, value in zip(shared, before, strict=True):
                        item.value.copy_(value)
                    with self._multiplied(factor):
                        update(*map(list, zip(*own, strict=True)), inner.learning_rate)

        def decayed(variables: Sequence[Any]) -> None:
            for factor in dict.fromkeys(factors.values()):
                own = [v for v in variables if factors[id(v)] == factor]
                if any(map(inner._use_weight_decay, own)):
                    with self._multiplied(factor):
                        decay(own)

        vars(inner).update(_backend_update_step=updated, _apply_weight_decay=decayed)
        try:
            yield
        finally:
            del vars(inner)["_backend_update_step"], vars(inner)["_apply_weight_decay"]

    def _rate(self) -> float:
        return float(self._inner._get_current_learning_rate())

    def change_state(
        self,
        parameter: torch.Tensor,
        shape: torch.Size,
        change: Callable[[str, torch.Tensor], torch.Tensor],
    ) -> None:
        """Change Keras' state tensors that have a value for each element of a parameter.

        Args:
            parameter: the parameter that holds the value of a variable.
            shape: the previous shape of the parameter, which the state still has.
            change: function that gets the name of one of Keras' lists and the old tensor, and
                returns the new tensor.
        """
        inner = self._inner
        variable = next((v for v in self._variables if v._value is parameter), None)
        if variable is None or not inner.built:
            return
        at = inner._get_variable_index(variable)
        for name, held in vars(inner).items():
            if not isinstance(held, list) or name in _NOT_STATE or len(held) <= at:
                continue
            result = held[at]
            if hasattr(result, "_value") and result._value.shape == shape:
                result._value.data = change(name, result._value.data)
                set_shape(result)

    def first_state(self, parameter: torch.Tensor, name: str) -> float:
        """Return the value before the first step of all elements in one of Keras' state lists."""
        is_sum = name == "_accumulators"
        return float(getattr(self.keras, "initial_accumulator_value", 0.0)) if is_sum else 0.0

    def parameters_left_out(self, model: nn.Module) -> Sequence[str]:
        """Return no names: Keras passes all trainable variables to its optimizer."""
        return ()

    def state_places(self) -> dict[int, int]:
        """Return the variable's index for each `state_dict` entry with a value per element."""
        inner = self._inner
        places: dict[int, int] = {}
        for place, variable in enumerate(self._variables):
            at = inner._get_variable_index(variable)
            for name, held in vars(inner).items():
                if isinstance(held, list) and name not in _NOT_STATE and len(held) > at:
                    places[id(held[at])] = place
        numbered = enumerate(self._state_variables())
        return {number: places[id(held)] for number, held in numbered if id(held) in places}

    def why_whole(self) -> str:
        """Return the reason why a step of sharded weights would differ from a plain step, or ""."""
        kind = type(self.keras)
        if kind.__name__ not in _ELEMENTWISE or not kind.__module__.startswith("keras."):
            return f"{kind.__name__} is not known to step each element alone"
        asked = [name for name in _ALL_ELEMENTS if getattr(self.keras, name, None)]
        if asked:
            return f"{asked[0]} of {kind.__name__} reads whole weights or gradients"
        if self._late:
            return "some weights begin to train later"
        bound = [v.path for v in self._variables if v.constraint is not None]
        return f"the constraint of {bound[0]} reads all of it" if bound else ""

    def options(self) -> list[dict[str, Any]]:
        """Return the Keras optimizer's options as plain values by dotted name, in one group."""
        try:
            config = self.keras.get_config()
        except NotImplementedError:  # a custom schedule without a configuration
            config = {k: v for k, v in vars(self.keras).items() if k in _OPTIONS}
        result = dict(_flat(config))
        if self.is_scheduled:
            schedule = self._inner._learning_rate
            result["learning_rate.class_name"] = type(schedule).__qualname__
            if not is_library(type(schedule)):
                result["learning_rate.code"] = code_digest(schedule)[:8]
        return [result]

    def take_option(self, group: int, name: str, value: Any) -> None:
        """Replace the loaded learning rate; no state holds other options."""
        if name in self.rate_names:
            self._inner._learning_rate.assign(value)
            self._show_rates()

    @contextmanager
    def own_rate(self) -> Iterator[None]:
        """Restore the present rate after the block, or start a schedule, whatever was loaded."""
        keras, rate = self.keras, float(self.keras._get_current_learning_rate())
        yield
        if hasattr(keras._learning_rate, "assign"):
            keras._learning_rate.assign(rate)
        else:  # a schedule, which depends on the optimizer's step count
            keras._iterations.assign(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors of all variables of the Keras optimizer, in its order."""
        self._show_rates()  # a callback may have changed the rate since the last step
        state = {
            number: {"value": variable.value.detach()}
            for number, variable in enumerate(self._state_variables())
        }
        numbers = iter(range(len(self._parameters)))
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            for group in self.param_groups
        ]
        late = [number for number, v in enumerate(self._variables) if id(v) in self._late]
        return {"state": state, "param_groups": groups, "late": late}

    def _state_variables(self) -> list[Any]:
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
        """Load the output of `state_dict` into the same variables; `begin` those that trained.

        Raises:
            ValueError: the state belongs to another optimizer.
        """
        late = set(state_dict.get("late", ()))
        started = [
            v for n, v in enumerate(self._variables) if id(v) in self._late and n not in late
        ]
        if started:
            self._start(started)
        variables, saved = self._state_variables(), state_dict["state"]
        if len(saved) != len(variables):
            raise ValueError(
                f"the state has {len(saved)} variables, {self.keras.name} has {len(variables)}"
            )
        for number, variable in enumerate(variables):
            variable.value.copy_(saved[number]["value"])
        for group, options in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in options.items() if k != "params"})


@contextmanager
def _unclipped(optimizer: Any) -> Iterator[None]:
    vars(optimizer)["_clip_gradients"] = list
    try:
        yield
    finally:
        del vars(optimizer)["_clip_gradients"]


class _Scaler(torch.amp.GradScaler):
    """Scaler of losses by a `LossScaleOptimizer`'s rule; each step writes the scale back to it.

    A `.keras` file and the next fit thus continue with this scale.
    """

    def __init__(self, optimizer: Any, device: str) -> None:
        scale, steps = float(optimizer.dynamic_scale.value), optimizer.dynamic_growth_steps
        super().__init__(device, init_scale=scale, growth_interval=steps)
        self._keras = optimizer

    @torch.no_grad()
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        self._keras.dynamic_scale.value.copy_(self._scale)


@contextmanager
def _unscaled(optimizer: Any) -> Iterator[None]:
    factor = optimizer.loss_scale_factor
    dynamic = getattr(optimizer, "dynamic_scale", None)  # LossScaleOptimizer
    if dynamic is not None:
        scale = dynamic.value.clone()
        dynamic.value.fill_(1.0)
    elif factor is not None:
        optimizer.loss_scale_factor = None
    try:
        yield
    finally:
        optimizer.loss_scale_factor = factor
        if dynamic is not None:
            dynamic.value.mul_(scale)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("name", "registered_name", "module"):
                path = name if key == "config" else f"{name}.{key}".lstrip(".")
                yield from _flat(item, path)
    else:
        plain = isinstance(value, (bool, int, float, str, type(None)))
        yield name, value if plain else str(value)


def keras_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[torch.optim.Optimizer, KerasOptimizer]:
    """Return the Keras optimizers, which keep their state in Keras' variables."""
    return {item: item for item in optimizers if isinstance(item, KerasOptimizer)}
