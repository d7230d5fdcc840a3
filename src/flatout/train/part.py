"""A Part acts around an optimizer step. A Chain makes one function of a job's Parts.

Steps cost no lookup of hooks: the Chain is composed when a Part is added or removed, and contains
only the hooks that a Part's class defines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from flatout.errors import FlatoutError

if TYPE_CHECKING:
    from flatout.data import Batch
    from flatout.train.losses.loss_value import Compute
    from flatout.train.losses.losses import Value
    from flatout.train.turn import Turn


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step to be made.

    Attributes:
        number: number of the step in the job, from 1.
        batches: batches on the device; more than one where gradients are accumulated.
        compute: function that returns the loss of a batch or micro-batch: a mean, or (sum, weight).
        turn: state of the optimizers that step.
    """

    number: int
    batches: Sequence[Batch]
    compute: Compute
    turn: Turn


Lanes = tuple[int, int, int, int]
"""Clock at the request of a step's first batch, then the times of fetching, copying and waiting for
other ranks; in ns."""


class Done(NamedTuple):
    """The result of one optimizer step.

    Attributes:
        loss: mean loss of the step, over all ranks; a scalar on the device.
        weight: weight of that mean, such as the number of samples.
        forward, backward, sync, optimizer: time of each phase on the host, in ns.
    """

    loss: torch.Tensor
    weight: torch.Tensor | float
    forward: int
    backward: int
    sync: int
    optimizer: int


class Part:
    """Base class of objects that act around a step; a subclass defines the hooks that it needs.

    The page "Parts" has an example.
    """

    def prepare(self, job: Any) -> None:
        """Get ready. Called once the model is placed and the settings of the first step are known.

        A resume loads the weights and this Part's state after this call.

        Args:
            job: the `flatout.Loop`, with `model`, `optimizers`, `device`, `world`, `note(line)`
                and `drop(part)`.
        """

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make a step by `run`: change the Step before, run it twice, or do not run it.

        Args:
            step: the step to make.
            run: makes a step, with the Parts that follow in the order.

        Returns:
            The result of the step.
        """
        return run(step)

    def around_piece(self, piece: Batch, run: Callable[[Batch], Value]) -> Value:
        """Compute forward and loss of a batch, or of a micro-batch, by `run`."""
        return run(piece)

    def before_sum(self, step: Step) -> None:
        """Act on this rank's gradients, before the gradients of all ranks are summed."""

    def before_update(self, step: Step) -> None:
        """Act on the gradients of all ranks, before the optimizers step."""

    def after_step(self, step: Step, done: Done) -> None:
        """Act after the weights have changed and the step was counted."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs of this Part; plain data and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def close(self, error: BaseException | None) -> None:
        """Undo the changes that this Part has made, at the end of the job.

        Args:
            error: the exception that ended training; None without one.
        """


def check_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the user's Parts as a tuple.

    Raises:
        FlatoutError: an object is no Part, or has a method whose name resembles the name of a hook.
    """
    for part in parts:
        if not isinstance(part, Part):
            raise FlatoutError(
                f"parts takes objects of subclasses of flatout.Part, found {type(part).__name__}",
                do="write `class MyPart(flatout.Part):` with the hooks that are needed",
            )
        for name in dir(type(part)):
            begin = name.split("_")[0]
            if begin in _BEGINNINGS and callable(getattr(part, name)) and name not in _HOOKS:
                near = get_close_matches(name, _HOOKS, 1, 0.0)[0]
                raise FlatoutError(
                    f"{type(part).__name__}.{name} is no hook of a Part and would never be called",
                    do=f"rename it to {near}, or to _{name} if it is your own",
                )
    return tuple(parts)


_BEGINNINGS = ("around", "before", "after")
_HOOKS = [name for name in vars(Part) if not name.startswith("_")]
_Kind = TypeVar("_Kind", bound=Part)
_Result = TypeVar("_Result")


class Chain:
    """The Parts of a job, composed into the functions that a step calls.

    Args:
        make: function that makes a step without any Part.
        order: classes of Parts, the outermost first. `Part` itself marks the position of all other
            classes.

    Attributes:
        parts: the Parts, the outermost first.
        run: function that makes a step with all Parts.
    """

    def __init__(self, make: Callable[[Step], Done], order: Sequence[type[Part]] = (Part,)) -> None:
        self._make, self._order = make, tuple(order)
        self.run: Callable[[Step], Done]
        self.parts: list[Part] = []
        self._compose()

    def add(self, *parts: Part) -> None:
        """Let Parts act from the next step on."""
        self.parts = sorted([*self.parts, *parts], key=self._place)
        self._compose()

    def drop(self, part: Part) -> None:
        """Remove a Part; a Part that is not in the Chain is no error."""
        self.parts = [one for one in self.parts if one is not part]
        self._compose()

    def find(self, kind: type[_Kind]) -> _Kind | None:
        """Return the first Part of a class; None if there is none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def inside(self, kind: type[Part]) -> Callable[[Step], Done]:
        """Return a function that makes a step with the Parts that follow a kind in the order.

        Args:
            kind: a kind of the order; Parts of this kind are left out.
        """
        place = self._order.index(kind)
        return _around([part for part in self.parts if self._place(part) > place], self._make)

    def repeat(self, step: Step, compute: Callable[[Step], _Result]) -> _Result:
        """Compute something of a step again, with only the Parts that act on pieces.

        These Parts get a result without a loss, since no step is made.
        """
        results: list[_Result] = []

        def make(step: Step) -> Done:
            results.append(compute(step))
            return Done(torch.zeros(()), 0.0, 0, 0, 0, 0)

        _around(self._of_pieces, make)(step)
        return results[-1]

    def forward(self, compute: Compute) -> Callable[[Batch], Value]:
        """Return `compute` with the Parts that act around a piece."""
        for around in self._around_piece:
            compute = _bound(around, compute)
        return compute

    @property
    def acts_within(self) -> bool:
        """Whether any Part acts on micro-batches, or on gradients before the update."""
        return bool(self._of_pieces or self.before_update)

    def _place(self, part: Part) -> int:
        kinds = [kind for kind in type(part).__mro__ if kind in self._order]
        return self._order.index(kinds[0])

    def _compose(self) -> None:
        self.run = _around(self.parts, self._make)
        self._of_pieces = [part for part in self.parts if _defines(part, "around_piece")]
        self._around_piece = [part.around_piece for part in reversed(self._of_pieces)]
        self.before_sum = _hooks(self.parts, "before_sum")
        self.before_update = _hooks(self.parts, "before_update")
        # The innermost Part's `after_step` is called first.
        self.after_step = [*reversed(_hooks(self.parts, "after_step"))]


def _around(parts: Sequence[Part], make: Callable[[Step], Done]) -> Callable[[Step], Done]:
    run = make
    for hook in reversed(_hooks(parts, "around_step")):
        run = _bound(hook, run)
    return run


def _bound(hook: Callable[..., _Result], run: Callable[..., _Result]) -> Callable[..., _Result]:
    # By position: a user's hook may name its arguments otherwise.
    return lambda item: hook(item, run)


def _hooks(parts: Sequence[Part], name: str) -> list[Callable[..., Any]]:
    return [getattr(part, name) for part in parts if _defines(part, name)]


def _defines(part: Part, name: str) -> bool:
    return getattr(type(part), name) is not getattr(Part, name)
