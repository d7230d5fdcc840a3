"""One optimizer update: clip, gate, step, forget the gradients.

Gradients that exist before a step's first backward come from other code, such as another loss that
uses this model. They are forgotten, so that a step applies the gradients of its own batches only.

A step whose gradients are not finite must not change the weights, and the check must not make the
host wait for the device. So the check runs on the device (as in `GradScaler`) and sets a flag
there. The fused kernel reads the flag and leaves weights and state as they are. The flag stays set:
after a bad step, all later steps are held back too, until the host reads it. On a CPU, where
reading is free, the host reads it at once. On another device, an optimizer without a fused kernel
that does not read such a flag itself cannot hold back a bad step; the step is only reported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from flatout.errors import ModelError
from flatout.optim.adapter import Optimizers, as_tuple
from flatout.optim.fused import align_state, begins_late
from flatout.optim.row_rules import is_patched
from flatout.optim.row_shards import RowShards
from flatout.optim.touched_rows import TouchedRows

Tensors = list[torch.Tensor]
# Applies the gradients of one parameter group, unless the flag on their device is set.
Kernel = Callable[[Tensors, torch.Tensor | None], None]

_NO_ROWS: Mapping[torch.optim.Optimizer, TouchedRows] = MappingProxyType({})
_NOTHING = nullcontext()


class Update:
    """Applies the gradients of the optimizers' parameters, unless they hold a NaN or infinity.

    Args:
        optimizers: one or several torch optimizers that step together. They stay the owners of
            their state and options.
        clip_norm: largest total 2-norm of all gradients (Pascanu et al. 2013), or None.
        clip_value: largest absolute value of a gradient element, or None.
        flags: flags, by device, of updates that all stop after a bad step of one of them.
        rows: by optimizer, the tables that are stepped by the rows that a batch has used.

    Attributes:
        parameters: the parameters of all optimizers, each once.
        across: sums numbers, in place, over all ranks that hold the other parts of these
            parameters; None if the parameters are whole.

    Raises:
        ModelError: an optimizer's step needs a closure, such as LBFGS.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        flags: dict[torch.device, torch.Tensor] | None = None,
        rows: Mapping[torch.optim.Optimizer, TouchedRows] = _NO_ROWS,
    ) -> None:
        for optimizer in as_tuple(optimizers):
            _refuse_closure(optimizer)
        self._rows = rows
        self.parts = [OptimizerStep(optimizer, rows) for optimizer in as_tuple(optimizers)]
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.across: Callable[[torch.Tensor], None] | None = None
        self._flags = {} if flags is None else flags
        self._skipped: torch.Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the optimizers again after their options, state or parameters were exchanged."""
        for part in self.parts:
            part.refresh()
        self.parameters: Tensors = list(
            dict.fromkeys(p for part in self.parts for p in part.parameters)
        )
        devices = dict.fromkeys(p.device for p in self.parameters)
        if not devices:  # other ranks have all parameters of these optimizers
            devices = {torch.device("cpu"): None}
        for device in devices:
            # A flag that is set stays set, until someone clears it.
            self._flags.setdefault(device, torch.zeros((), device=device))
        self._one = {d: torch.ones((), device=d) for d in devices}
        # A shortcut for the usual case of one device.
        self.flag = self._flags[next(iter(devices))] if len(devices) == 1 else None
        self._one_kind = _one_kind(self.parameters) and self.parameters[0].is_floating_point()
        self._on_cpu = list(devices) == [torch.device("cpu")]
        shards = {id(rows.shards): rows.shards for rows in self._rows.values() if rows.shards}
        self._shards = next(iter(shards.values()), None)

    @property
    def gated(self) -> bool:
        """True if a bad step is held back before it changes the weights."""
        heeded = all(part.heeds_flag for part in self.parts)
        return self._on_cpu or (heeded and self.flag is not None)

    def was_bad(self) -> bool:
        """Return whether gradients of a step were not finite. Waits for the device."""
        if self.flag is not None:
            return self.flag.item() != 0
        return any(flag.item() != 0 for flag in self._flags.values())

    def clear(self) -> None:
        """Clear the flags of a bad step, so that updates continue."""
        for flag in self._flags.values():
            flag.zero_()

    def clip(self) -> None:
        """Clip the gradients by norm and by value, as configured."""
        if self.clip_norm is None and self.clip_value is None:
            return
        if any(g.layout is not torch.strided for g in _gradients(self.parameters)):
            self._clip_rows()
            return
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters, self.clip_value)

    def _clip_rows(self) -> None:
        values: Tensors = []
        own: Tensors = []
        shards = self._shards_now()
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.coalesce()
                is_part = shards is not None and parameter in shards
                (own if is_part else values).append(parameter.grad.values())
            elif parameter.grad is not None:
                values.append(parameter.grad)
        every = [*values, *own]
        if self.clip_norm is not None:
            whole = torch.nn.utils.get_total_norm(values)
            norm = whole if shards is None else shards.total_norm(whole, own)
            torch._foreach_mul_(every, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if self.clip_value is not None:
            torch._foreach_clamp_min_(every, -self.clip_value)
            torch._foreach_clamp_max_(every, self.clip_value)

    def _shards_now(self) -> RowShards | None:
        shards = self._shards
        return shards if shards is not None and shards.is_in_step else None

    def _check_and_clip_parts(
        self, gradients: Tensors, across: Callable[[torch.Tensor], None]
    ) -> None:
        """Check and clip, with the same result on all ranks that hold the other parts."""
        assert self.flag is not None
        self._check(gradients)
        numbers = torch.zeros(2, dtype=torch.float64, device=self.flag.device)
        numbers[0] = self.flag
        if self.clip_norm is not None:
            numbers[1] = torch.nn.utils.get_total_norm(gradients).double().square()
        across(numbers)
        self.flag.copy_(numbers[0].clamp(max=1.0))
        if self.clip_norm is not None:
            norm = numbers[1].sqrt().to(gradients[0].dtype) if gradients else numbers[1]
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        if self.clip_value is not None and gradients:
            torch.nn.utils.clip_grad_value_(self.parameters, self.clip_value)

    def begin(self) -> None:
        """Forget existing gradients before a step's first backward."""
        if any(part.is_stale() for part in self.parts):
            self.refresh()
        self.forget()

    def forget(self) -> None:
        """Set the gradients of the optimizers' parameters to None, and no others."""
        with self._unwatched():
            # Setting an attribute to None costs 50 ns, less than a check for None.
            for parameter in self.parameters:
                parameter.grad = None

    def __call__(self) -> None:
        """Clip, check and apply the gradients, then set them to None."""
        with torch.no_grad():  # as a decorator it takes 2 us more
            self._apply()

    def _apply(self) -> None:
        if any(part.is_stale() for part in self.parts):
            self.refresh()
        with self._unwatched():
            if self._rows:
                for part in self.parts:
                    part.gather_rows()
            if self.across is None:
                self.clip()
                gradients = _gradients(self.parameters)
                self._check(gradients)
            else:
                gradients = _gradients(self.parameters)
                self._check_and_clip_parts(gradients, self.across)
        if (shards := self._shards_now()) is not None and self.flag is not None:
            shards.share(self.flag)
        # On a CPU reading the flag costs nothing, so a bad step is not even begun.
        if not (self._on_cpu and self.was_bad()):
            alone = len(self.parts) == 1 and not self._rows
            for part in self.parts:
                part.step_rows()
                part(gradients if alone else _gradients(part.own), self.flag, self._on_cpu)
        self.forget()

    def scaled(self, scaler: torch.amp.GradScaler) -> None:
        """Clip, check and apply gradients of a scaled loss; leave out a step that overflowed."""
        # An optimizer whose parameters got no gradients has nothing to do.
        if self._rows:
            for part in self.parts:
                part.gather_rows()
        reached = [part for part in self.parts if any(p.grad is not None for p in part.parameters)]
        if self._rows or self.clip_norm is not None or self.clip_value is not None:
            for part in reached:
                scaler.unscale_(part.optimizer)
            self.clip()
        for part in reached:
            part.step_scaled(scaler)
        if reached:
            self._count_skipped(scaler, reached)
            scaler.update()
        self.forget()

    def _count_skipped(
        self, scaler: torch.amp.GradScaler, reached: Sequence[OptimizerStep]
    ) -> None:
        """Count a step that overflowed, on the device, without waiting for it."""
        found = [
            f for part in reached for f in scaler._found_inf_per_device(part.optimizer).values()
        ]
        if found:
            bad = torch.stack([flag.to(found[0].device).reshape(()) for flag in found]).amax()
            self._skipped = bad if self._skipped is None else self._skipped + bad

    @property
    def skipped(self) -> int:
        """The number of steps left out because gradients overflowed. Waits for the device."""
        return 0 if self._skipped is None else int(self._skipped)

    def _unwatched(self) -> AbstractContextManager[Any]:
        return torch._C.DisableTorchFunctionSubclass() if self._rows else _NOTHING

    def _check(self, gradients: Tensors) -> None:
        """Set the flag of each device that holds a gradient with a NaN or infinity."""
        gradients = [g if g.layout is torch.strided else g.coalesce().values() for g in gradients]
        if self.flag is not None and self._one_kind:
            if gradients:
                _set_if_bad(gradients, self.flag, self._one[self.flag.device])
            return
        for gradient in gradients:
            values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            _set_if_bad([values], self._flags[gradient.device], self._one[gradient.device])


class OptimizerStep:
    """One optimizer's own step, gated if possible.

    Attributes:
        heeds_flag: whether it leaves weights and state as they are if a flag on the device is set.
        own: its parameters that are stepped whole.
        direct: kernels that replace the optimizer's own step, or None.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rows: Mapping[torch.optim.Optimizer, TouchedRows] = _NO_ROWS,
    ) -> None:
        self.optimizer, self._all_rows = optimizer, rows
        self.refresh()

    def refresh(self) -> None:
        optimizer = self.optimizer
        self._groups, self._state = optimizer.param_groups, optimizer.state
        self.parameters: Tensors = [p for g in self._groups for p in g["params"]]
        self._fused = all(g.get("fused") for g in self._groups)
        # torch marks optimizers that read `found_inf` themselves, such as Lars and Lamb.
        self.heeds_flag = self._fused or getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._fused:
            align_state(optimizer)
        self.direct: list[Kernel] | None = None
        self.rows = self._all_rows.get(optimizer)
        tables = set(self.rows.weights) if self.rows and not self.rows.by_optimizer else ()
        self._own = [[p for p in g["params"] if p not in tables] for g in self._groups]
        self.own: Tensors = [p for parameters in self._own for p in parameters]

    def is_stale(self) -> bool:
        optimizer, groups = self.optimizer, self._groups
        return (
            optimizer.param_groups is not groups
            or optimizer.state is not self._state
            or len(groups) != len(self._own)
        )

    def gather_rows(self) -> None:
        if self.rows is not None and self.rows.gather():
            self.refresh()

    def step_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """Step the tables and then the optimizer, unless a gradient overflowed."""
        rows = self.rows
        if rows is None:
            scaler.step(self.optimizer)
            return

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            # A fused optimizer is called in any case, because it reads this flag itself.
            bad = getattr(optimizer, "found_inf", None)
            if bad is None or not bad.item():
                self.step_rows()
            else:
                for weight in rows.weights:
                    weight.grad = None

        hook = self.optimizer.register_step_pre_hook(before)
        try:
            scaler.step(self.optimizer)
        finally:
            hook.remove()

    def step_rows(self) -> None:
        if self.rows is not None:
            self.rows.step()

    def __call__(self, gradients: Tensors, flag: torch.Tensor | None, on_cpu: bool) -> None:
        complete = len(gradients) == len(self.own)
        # The state is empty after someone has reset the optimizer.
        if self.direct is not None and complete and self._state and not self.hooked():
            self._step_directly(gradients, None if on_cpu else flag)
            return
        self._step_optimizer(None if on_cpu else flag)
        if self._fused and flag is not None and complete:
            self.direct = direct_kernels(self.optimizer, self._own)

    def _step_optimizer(self, flag: torch.Tensor | None) -> None:
        optimizer = self.optimizer
        if self._fused and begins_late(optimizer):
            self._step_unfused()
        elif self.heeds_flag and flag is not None:
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = flag  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.step()

    def _step_unfused(self) -> None:
        for group in self._groups:
            group["fused"] = False
        try:
            self.optimizer.step()
        finally:
            for group in self._groups:
                group["fused"] = True

    def _step_directly(self, gradients: Tensors, flag: torch.Tensor | None) -> None:
        assert self.direct is not None
        start = 0
        for kernel, own in zip(self.direct, self._own, strict=True):
            end = start + len(own)
            kernel(gradients[start:end], flag)
            start = end
        # torch's schedulers read this to check that the optimizer stepped before them.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def hooked(self) -> bool:
        optimizer = self.optimizer
        return bool(
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or is_patched(optimizer)
        )


def _gradients(parameters: Tensors) -> Tensors:
    return [g for p in parameters if (g := p.grad) is not None]


def _set_if_bad(gradients: Tensors, flag: torch.Tensor, tensor: torch.Tensor) -> None:
    # CUDA has no such kernel for bfloat16
    if flag.is_cuda and gradients[0].dtype is torch.bfloat16:
        sums = torch.stack(torch._foreach_norm(gradients, 1))
        flag.masked_fill_(~sums.isfinite().all(), 1.0)
        return
    # Multiplies by one, which leaves every value as it is.
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, tensor)


def _refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        name = type(optimizer).__name__
        raise ModelError(
            f"{name} evaluates the loss several times in one step, through a closure",
            do="use an optimizer that steps once per batch, such as Adam, or call "
            f"{name}.step(closure) in a loop of your own",
        )


def direct_kernels(optimizer: torch.optim.Optimizer, own: Sequence[Tensors]) -> list[Kernel] | None:
    """Return one function per parameter group that calls torch's fused kernel with cached lists.

    Return None if the optimizer must step itself: another class, options that the kernels do not
    take, or state that does not exist yet.
    """
    build = {
        torch.optim.Adam: _adam_kernel,
        torch.optim.AdamW: _adam_kernel,
        torch.optim.SGD: _sgd_kernel,
    }.get(type(optimizer))
    if build is None:
        return None
    kernels = [
        build(optimizer, group, parameters) if parameters else _no_step
        for group, parameters in zip(optimizer.param_groups, own, strict=True)
    ]
    if any(kernel is None for kernel in kernels):
        return None
    return [kernel for kernel in kernels if kernel is not None]


def _no_step(gradients: Tensors, flag: torch.Tensor | None) -> None:
    """Do nothing, for a group that has only tables."""


def _states(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], name: str
) -> Tensors | None:
    states = [optimizer.state.get(p, {}) for p in parameters]
    if any(state.get(name) is None for state in states):
        return None
    return [state[name] for state in states]


def _one_kind(parameters: Tensors) -> bool:
    return len({(p.device, p.dtype) for p in parameters}) == 1


def _adam_kernel(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Tensors
) -> Kernel | None:
    means = _states(optimizer, parameters, "exp_avg")
    squares = _states(optimizer, parameters, "exp_avg_sq")
    steps = _states(optimizer, parameters, "step")
    largest = _states(optimizer, parameters, "max_exp_avg_sq") if group["amsgrad"] else []
    plain = not any(torch.is_tensor(v) for v in (group["lr"], *group["betas"]))
    if means is None or squares is None or steps is None or largest is None:
        return None
    if not plain or not _one_kind(parameters):
        return None
    # With a Python number, or without alpha, torch would make a tensor for each step count.
    one = torch.ones((), device=steps[0].device)
    decoupled = type(optimizer) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def step(gradients: Tensors, flag: torch.Tensor | None) -> None:
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, one, alpha=1.0)
        kernel(
            parameters,
            gradients,
            means,
            squares,
            largest,
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            found_inf=flag,
        )
        if flag is not None:
            # A step that was held back does not count.
            torch._foreach_sub_(steps, [flag] * len(steps))

    return step


def _sgd_kernel(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Tensors
) -> Kernel | None:
    momenta = _states(optimizer, parameters, "momentum_buffer") if group["momentum"] else []
    if momenta is None or torch.is_tensor(group["lr"]) or not _one_kind(parameters):
        return None

    def step(gradients: Tensors, flag: torch.Tensor | None) -> None:
        torch._fused_sgd_(
            parameters,
            gradients,
            momenta,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            found_inf=flag,
        )

    return step
