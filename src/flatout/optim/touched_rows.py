"""Steps tables by the rows that a batch has used, with the result of their dense optimizer.

A dense optimizer walks through all rows of a table in each step, those that no sample has used
included, since their moments decay and move them. Here a row is brought through the steps that it
missed when it is read next (kernels/table_rows.py), and all rows are, by `settle`, before someone
looks at the whole table: a state dict, an evaluation, the end.

Gradients come as torch's sparse ones. Each row's are added up in the order of the samples, so that
results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from flatout.kernels import table_rows
from flatout.kernels.table_rows import Groups, Step, Steps, Table
from flatout.models import unwatch_table, watch_table

# So many steps are kept; then all rows are brought up to date, in one pass over the table.
_ROOM = 4096

_RULES: dict[type, str] = {
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
}
# Options under which a row's missed steps do not follow from its own state, or that no kernel has.
_OPTIONS = ("amsgrad", "maximize", "centered", "dampening", "differentiable", "capturable")


def why_dense(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    """What keeps a group of an optimizer from stepping single rows; "" where nothing does."""
    if type(optimizer) not in _RULES:
        return f"{type(optimizer).__name__} steps all rows"
    if not table_rows.available():
        return "the C extension is absent"
    asked = [name for name in _OPTIONS if group.get(name)]
    if asked:
        return f"{asked[0]} steps all rows"
    numbers = (group["lr"], *group.get("betas", ()))
    if any(map(torch.is_tensor, numbers)):
        return "a learning rate that is a tensor steps all rows"
    return ""


def steppable_rows(
    optimizers: Sequence[torch.optim.Optimizer], modules: Iterable[nn.Module]
) -> dict[torch.optim.Optimizer, list[nn.Parameter]]:
    """Tables of these modules that can be stepped by rows, by optimizer.

    Args:
        optimizers: of the model.
        modules: that read their tables by rows alone.
    """
    owners: dict[int, list[torch.optim.Optimizer]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"] if not why_dense(optimizer, group) else ():
                owners.setdefault(id(parameter), []).append(optimizer)
    found: dict[torch.optim.Optimizer, list[nn.Parameter]] = {}
    weights: dict[Any, None] = dict.fromkeys(module.weight for module in modules)
    for weight in weights:
        of = owners.get(id(weight), [])
        if len(of) == 1:
            found.setdefault(of[0], []).append(weight)
    return found


class Kept:
    """A table, its optimizer's state, and which of its rows are behind.

    Args:
        weight: float32 on the CPU, of shape (rows, width), contiguous.
        group: of its optimizer.
    """

    def __init__(self, weight: nn.Parameter, group: dict[str, Any]) -> None:
        self.weight, self.group = weight, group
        self.groups: tuple[torch.Tensor, Groups] | None = None  # ids read last, and their rows
        self.steps: Steps | None = None
        self.table: Table | None = None
        self.state: dict[str, Any] = {}

    def attach(self) -> None:
        """Bring rows up to date before they are read, and get sparse gradients."""
        watch_table(self.weight, self)

    def detach(self) -> None:
        """Bring all rows up to date, and leave them to the optimizer."""
        unwatch_table(self.weight)
        self.settle()
        self.steps = self.table = self.groups = None

    def by_rows(self, ids: torch.Tensor) -> bool:
        """Rows are to be read by an embedding."""
        if self.steps is not None and self.table is not None and self.steps.now > self.steps.base:
            try:
                rows = self.group_rows(ids.detach().reshape(-1).to(torch.int64)).rows
            except IndexError:
                return True  # torch says it in its own words
            self.steps.bring(self.table, rows)
        return True

    def whole(self) -> None:
        """The values are to be read, or written."""
        self.settle()

    def group_rows(self, ids: torch.Tensor) -> Groups:
        """The rows among ids; of those that were read last without sorting them again."""
        if self.groups is not None and torch.equal(self.groups[0], ids):
            return self.groups[1]
        found = table_rows.group(ids, len(self.weight))
        self.groups = (ids, found)
        return found

    def holds(self, state: dict[str, Any]) -> bool:
        """Whether its table is made of this state and of the options that hold."""
        held = (self.table.first, self.table.second) if self.table else ()
        return (
            state is self.state
            and self.table is not None
            and all(one is None or any(one is value for value in state.values()) for one in held)
            and self.table.epsilon == self.group.get("eps", 0.0)
            and self.table.weights.data_ptr() == self.weight.data_ptr()
            and (self.group.get("momentum", 0) == 0 or self.table.first is not None)
        )

    def settle(self) -> None:
        """Bring all rows up to date."""
        if self.steps is not None and self.table is not None and self.steps.now > self.steps.base:
            self.steps.bring(self.table, None)
            torch.autograd.graph.increment_version(self.weight)


class TouchedRows:
    """The tables of one optimizer.

    Args:
        optimizer: stays the owner of options and state.
        weights: tables of its groups that are read by rows.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Iterable[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._rule = _RULES[type(optimizer)]
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._kept = [Kept(weight, groups[weight]) for weight in weights]
        self._undo: list[Callable[[], Any]] = []

    @property
    def weights(self) -> list[nn.Parameter]:
        """The tables."""
        return [kept.weight for kept in self._kept]

    def attach(self) -> None:
        """Read, from now on, rows that are up to date, and get sparse gradients."""
        for kept in self._kept:
            kept.attach()
        self._undo = [
            self._optimizer.register_state_dict_pre_hook(lambda _: self.settle()).remove,
            self._optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle()).remove,
        ]

    def detach(self) -> None:
        """Bring all rows up to date, and leave them to the optimizer."""
        for kept in self._kept:
            kept.detach()
        for undo in self._undo:
            undo()

    def settle(self) -> None:
        """Bring all rows up to date."""
        for kept in self._kept:
            kept.settle()

    # -- a step ------------------------------------------------------------------------------

    def gather(self) -> bool:
        """Make each table's gradient one with every row once, in rising order.

        Returns whether a table was left to the optimizer: its gradient is dense, since something
        has read it in another way than by rows.
        """
        whole = [k for k in self._kept if k.weight.grad is not None and not k.weight.grad.is_sparse]
        for kept in whole:
            kept.detach()
            self._kept.remove(kept)
        for kept in self._kept:
            gradient = kept.weight.grad
            if gradient is None or gradient.is_coalesced():
                continue
            groups = kept.group_rows(gradient._indices()[0])
            values = table_rows.sum_rows(gradient._values(), groups)
            kept.weight.grad = torch.sparse_coo_tensor(
                groups.rows[None], values, gradient.shape, check_invariants=False, is_coalesced=True
            )
        return bool(whole)

    def step(self) -> None:
        """Apply the gradients, and set them to None.

        A table without a gradient is left as it is, as torch's optimizers do.
        """
        used = [kept for kept in self._kept if kept.weight.grad is not None]
        for kept in self._kept:
            if kept not in used and any(kept.steps is one.steps for one in used):
                kept.settle()
                kept.steps = None
        for kept in used:
            self._begin(kept)
        written: list[Steps] = []
        for kept in used:
            assert kept.steps is not None
            assert kept.table is not None
            if kept.steps not in written:
                written.append(kept.steps)
                kept.steps.write(_step_of(self._rule, kept.group, kept.steps.now + 1))
            gradient = kept.weight.grad
            assert gradient is not None
            kept.steps.apply(kept.table, gradient.indices()[0], gradient.values())
            torch.autograd.graph.increment_version(kept.weight)
            kept.weight.grad = None
            if torch.is_tensor(kept.state.get("step")):
                kept.state["step"] += 1
        for steps in written:
            steps.advance()
            if steps.is_full:
                self._restart(steps)

    def _begin(self, kept: Kept) -> None:
        """Before a table's step: its state is that of its optimizer, made where there is none."""
        state = self._optimizer.state[kept.weight]
        if kept.steps is not None and kept.holds(state):
            return
        if state is kept.state:  # another one was loaded when all rows were up to date
            kept.settle()
        first, second = _state_of(self._rule, state, kept)
        count = int(state["step"]) if "step" in state else 0
        begun = [one.steps for one in self._kept if one.group is kept.group and one.steps]
        fresh = [steps for steps in begun if steps.base == steps.now == count]
        kept.steps = fresh[0] if fresh else Steps(self._rule, count, _ROOM)
        last = torch.full((len(kept.weight),), count, dtype=torch.int32)
        epsilon = kept.group.get("eps", 0.0)
        kept.table, kept.state = Table(kept.weight, first, second, last, epsilon), state

    def _restart(self, steps: Steps) -> None:
        for kept in self._kept:
            if kept.steps is steps:
                kept.settle()
        steps.restart(steps.now)


def _state_of(
    rule: str, state: dict[str, Any], kept: Kept
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tensors of a rule's state, made as torch makes them where there are none."""
    names = {
        "adam": ("exp_avg", "exp_avg_sq"),
        "sgd": ("momentum_buffer" if kept.group.get("momentum") else None, None),
        "rmsprop": ("momentum_buffer" if kept.group.get("momentum") else None, "square_avg"),
        "adagrad": ("sum", None),
    }[rule]
    if rule != "sgd" and "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
    for name in filter(None, names):
        held = state.get(name)
        if held is None or not held.is_contiguous() or held.dtype is not torch.float32:
            fresh = torch.zeros(kept.weight.shape)
            state[name] = fresh if held is None else fresh.copy_(held)
    first, second = (state[name] if name else None for name in names)
    return first, second


def _step_of(rule: str, group: dict[str, Any], count: int) -> Step:
    """What step `count` of a group is, from 1; numbers rounded as torch's kernels round them."""
    rate, decay = group["lr"], group["weight_decay"]
    if rule == "adam":
        beta1, beta2 = group["betas"]
        is_decoupled = group.get("decoupled_weight_decay", False)
        return Step(
            rate / (1 - beta1**count),
            1 / math.sqrt(1 - beta2**count),
            _rounded(beta1),
            _rounded(beta2),
            _rounded(1 - rate * decay) if is_decoupled else 1.0,
            0.0 if is_decoupled else decay,
        )
    if rule == "adagrad":
        return Step(rate / (1 + (count - 1) * group["lr_decay"]), decay=decay)
    momentum, alpha = _rounded(group["momentum"]), _rounded(group.get("alpha", 0.0))
    is_nesterov = group.get("nesterov", False)
    return Step(rate, 1.0, momentum, alpha, 1.0, decay, is_nesterov)


def _rounded(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))
