"""One optimiser update: clip, gate, step, forget the gradients.

A step whose gradients are not finite must not reach the weights, and finding out must not make the
host wait for the device. So the check runs on the device (the same one that `GradScaler` uses) and
its flag goes to the fused kernel, which then leaves weights and state as they are. The flag is
never cleared: once a step was bad, all later ones are held back too, until the host reads it.
Where the optimiser has no fused kernel, the flag is read on the CPU (where reading is free); on
other devices such a step cannot be held back, only reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

Tensors = list[torch.Tensor]


class Update:
    """Applies the gradients of `optimizer`'s parameters, unless they hold a NaN or infinity.

    Args:
        optimizer: any torch optimiser; it stays the owner of its state and options.
        clip_norm: largest total 2-norm of the gradients (Pascanu et al. 2013), or None.
        clip_value: largest absolute value of a gradient element, or None.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.refresh()

    def refresh(self) -> None:
        """Look at the optimiser anew, after its options, state or parameters were exchanged."""
        self.parameters: Tensors = [p for g in self.optimizer.param_groups for p in g["params"]]
        devices = dict.fromkeys(p.device for p in self.parameters)
        self._flags = {d: torch.zeros((), device=d) for d in devices}
        self._one = {d: torch.ones((), device=d) for d in devices}
        # The usual case, one device, without a walk through a dictionary in each step.
        self.flag = next(iter(self._flags.values())) if len(devices) == 1 else None
        self._on_cpu = list(devices) == [torch.device("cpu")]
        self._fused = all(g.get("fused") for g in self.optimizer.param_groups)
        self._direct: list[Callable[[Tensors, torch.Tensor], None]] | None = None
        self._sizes = [len(g["params"]) for g in self.optimizer.param_groups]

    @property
    def gated(self) -> bool:
        """Whether a bad step is held back before it reaches the weights."""
        return self._on_cpu or (self._fused and self.flag is not None)

    def was_bad(self) -> bool:
        """Whether some step had gradients that are not finite. Waits for the device."""
        if self.flag is not None:
            return self.flag.item() != 0
        return any(flag.item() != 0 for flag in self._flags.values())

    def clear(self) -> None:
        """Forget a bad step, so that updates go on."""
        for flag in self._flags.values():
            flag.zero_()

    def clip(self) -> None:
        """Limit the gradients as asked."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters, self.clip_value)

    @torch.no_grad()
    def __call__(self) -> None:
        """Clip, check and apply the gradients, then set them to None."""
        parameters = self.parameters
        self.clip()
        gradients = [g for p in parameters if (g := p.grad) is not None]
        self._check(gradients)
        complete = len(gradients) == len(parameters)
        if self._direct is not None and complete and not self._hooked():
            self._step_directly(gradients)
        else:
            self._step_optimizer()
        for parameter in parameters:
            parameter.grad = None

    def _check(self, gradients: Tensors) -> None:
        """Set the flag of each device that holds a gradient with a NaN or infinity."""
        if self.flag is not None:
            _flag_non_finite(gradients, self.flag, self._one[self.flag.device])
            return
        for device, flag in self._flags.items():
            _flag_non_finite([g for g in gradients if g.device == device], flag, self._one[device])

    def _step_optimizer(self) -> None:
        """The optimiser's own step, gated as far as it can be."""
        if self._fused and self.flag is not None:
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = self.flag  # type: ignore[attr-defined]
            try:
                self.optimizer.step()
            finally:
                del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
            self._direct = direct_kernels(self.optimizer)
        elif not (self._on_cpu and self.was_bad()):
            self.optimizer.step()

    def _step_directly(self, gradients: Tensors) -> None:
        """The same kernels that the optimiser calls, without its bookkeeping (100 us a step)."""
        assert self._direct is not None
        assert self.flag is not None
        start = 0
        for kernel, size in zip(self._direct, self._sizes, strict=True):
            kernel(gradients[start : start + size], self.flag)
            start += size
        # torch's schedulers look here to see that the optimiser stepped before them.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _hooked(self) -> bool:
        optimizer = self.optimizer
        return bool(
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )


def _flag_non_finite(gradients: Tensors, flag: torch.Tensor, one: torch.Tensor) -> None:
    dense = [g for g in gradients if g.layout == torch.strided]
    if dense:
        torch._amp_foreach_non_finite_check_and_unscale_(dense, flag, one)
    for gradient in gradients:
        if gradient.layout != torch.strided:
            values = gradient.coalesce().values()
            torch._amp_foreach_non_finite_check_and_unscale_([values], flag, one)


def direct_kernels(
    optimizer: torch.optim.Optimizer,
) -> list[Callable[[Tensors, torch.Tensor], None]] | None:
    """One function per parameter group that calls torch's fused kernel with cached lists.

    Returns None where the optimiser must step itself: another class or a patched `step`, options
    that the kernels do not take, or state that does not exist yet.
    """
    build = {
        torch.optim.Adam: _adam_kernel,
        torch.optim.AdamW: _adam_kernel,
        torch.optim.SGD: _sgd_kernel,
    }.get(type(optimizer))
    if build is None or _is_patched(optimizer):
        return None
    kernels = [build(optimizer, group) for group in optimizer.param_groups]
    if any(kernel is None for kernel in kernels):
        return None
    return [kernel for kernel in kernels if kernel is not None]


def _is_patched(optimizer: torch.optim.Optimizer) -> bool:
    """A `step` put on the object by someone other than torch's schedulers must be called."""
    own = optimizer.__dict__.get("step")
    return own is not None and not getattr(own, "_wrapped_by_lr_sched", False)


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
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> Callable[[Tensors, torch.Tensor], None] | None:
    parameters: Tensors = group["params"]
    means = _states(optimizer, parameters, "exp_avg")
    squares = _states(optimizer, parameters, "exp_avg_sq")
    steps = _states(optimizer, parameters, "step")
    largest = _states(optimizer, parameters, "max_exp_avg_sq") if group["amsgrad"] else []
    plain = not any(torch.is_tensor(v) for v in (group["lr"], *group["betas"]))
    if means is None or squares is None or steps is None or largest is None:
        return None
    if not plain or not _one_kind(parameters):
        return None
    decoupled = type(optimizer) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def step(gradients: Tensors, flag: torch.Tensor) -> None:
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1)
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
        # A step held back does not count.
        torch._foreach_sub_(steps, flag)  # type: ignore[call-overload]

    return step


def _sgd_kernel(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> Callable[[Tensors, torch.Tensor], None] | None:
    parameters: Tensors = group["params"]
    momenta = _states(optimizer, parameters, "momentum_buffer") if group["momentum"] else []
    if momenta is None or torch.is_tensor(group["lr"]) or not _one_kind(parameters):
        return None

    def step(gradients: Tensors, flag: torch.Tensor) -> None:
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
