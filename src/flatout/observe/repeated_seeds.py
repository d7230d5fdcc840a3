"""Generators that the script resets to the same seed during training.

Epochs or steps then draw the same numbers as earlier epochs or steps. The seeding functions are
hooked. Torch's Generator class cannot be hooked: its orders are recognized by the result of
`torch.randperm`, and other numbers where they are drawn (repeated_draws.py).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from threading import get_ident
from types import FrameType
from typing import Any

from flatout.hooks import Hook, when_imported, wrap
from flatout.kernels import EVALUATION
from flatout.observe.generators import number_of_state, states_of_process
from flatout.observe.observation import RepeatedSeed, Site
from flatout.observe.sites import is_users, line_of
from flatout.observe.watch import Watch

# _PLACES: maximum number of lines that are recorded; _EVENTS: maximum number of calls of each line
# that are recorded.
_PLACES, _EVENTS = 64, 256
# _LEAST: minimum length of a random order, since a shorter order may repeat by chance; _COMPARED:
# maximum number of values of an order that are compared.
_LEAST, _COMPARED = 12, 4096
# Modules whose frames may lie between the user's line and a hooked function.
_INNER = ("random", "torch.random")


@dataclass
class _Place:
    """A user's line that seeds a generator, or draws a random order.

    Attributes:
        seed: hash of the seed or of the order.
        has_others: whether there were several seeds or orders, such as seed + epoch.
        steps: steps with such a call, where nothing suggests that the repetition is intended.
        optimizers: number of optimizers at the latest such call; a new optimizer begins another
            training.
        has_drawn: function that returns whether anything was drawn since the seeding.
    """

    kind: str
    site: Site
    seed: int | None = None
    has_others: bool = False
    events: int = 0
    steps: list[int] = field(default_factory=list)
    optimizers: int = 0
    has_drawn: Callable[[], bool] = lambda: True


class RepeatedSeeds:
    """Record of the seeding of generators of `random`, NumPy and torch."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._places: dict[tuple[str, str, int], _Place] = {}
        self._of_torch: list[Hook] = []
        self._tensor: Any = None
        watch.on_renewal.append(self._places.clear)
        watch.quick.on_end.append(self._leave_torch)
        wrap(random.Random, "seed", "observe", self._seeding, "random.Random", number_of_state)
        wrap(random, "seed", "observe", self._seeding, "random.seed", _of_process("random"))
        when_imported("numpy.random", self._hook_numpy)

    def _hook_numpy(self, numpy: Any) -> None:
        name = "numpy.random."
        made = self._seeding, f"{name}default_rng", number_of_state
        wrap(numpy, "default_rng", "observe", *made)
        wrap(numpy, "seed", "observe", self._seeding, f"{name}seed", _of_process("numpy"))

    def hook_torch(self, torch: Any) -> None:
        """Hook torch too, once it is imported."""
        self._tensor = torch.Tensor
        of_all = self._seeding, "torch.manual_seed", _of_process("torch")
        self._of_torch = [
            wrap(owner, "manual_seed", "observe", *of_all) for owner in (torch, torch.random)
        ]
        try:
            module: Any = import_module("torch.utils._device")
            # Filled before the hooks: it keeps the functions that a default device applies to.
            module._device_constructors()
        except (ImportError, AttributeError):  # an unknown version of torch
            return
        self._of_torch.append(wrap(torch, "randperm", "observe", self._ordering))

    def _leave_torch(self) -> None:
        while self._of_torch:
            self._of_torch.pop().remove()

    def _seeding(self, original: Any, kind: str, state_of: Callable[[Any], int]) -> Any:
        is_method = kind == "random.Random"

        def seed(*args: Any, **kwargs: Any) -> Any:
            given = args[1:] if is_method else args
            value = given[0] if given else next(iter(kwargs.values()), None)
            is_told = self._watch.lanes.thread == get_ident() and type(value) in (int, float, str)
            place = self._place(kind) if is_told else None
            if place is None:
                return original(*args, **kwargs)
            self._watch.aside(partial(self._before, place))
            result = original(*args, **kwargs)
            generator = args[0] if is_method else result
            self._watch.aside(partial(self._after, place, hash(value), generator, state_of))
            return result

        return seed

    def _ordering(self, original: Any) -> Any:
        def randperm(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            is_here = self._watch.lanes.thread == get_ident() and type(result) is self._tensor
            is_told = is_here and result.device.type == "cpu" and result.numel() >= _LEAST
            place = self._place("torch.randperm") if is_told else None
            if place is not None:
                self._watch.aside(partial(self._ordered, place, result))
            return result

        return randperm

    def _ordered(self, place: _Place, order: Any) -> None:
        self._note(place, hash(tuple(order[:_COMPARED].tolist())))

    def _place(self, kind: str) -> _Place | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") in _INNER:
            frame = frame.f_back
        if frame is None or not is_users(frame.f_code.co_filename):
            return None
        key = kind, frame.f_code.co_filename, line_of(frame)
        place = self._places.get(key)
        if place is None and len(self._places) < _PLACES:
            place = self._places[key] = _Place(kind, Site(*key[1:]))
        if place is None or place.has_others or place.events >= _EVENTS:
            return None
        return place

    def _before(self, place: _Place) -> None:
        if not place.has_drawn():
            place.steps.clear()

    def _after(
        self, place: _Place, seed: int, generator: Any, state_of: Callable[[Any], int]
    ) -> None:
        fresh = state_of(generator)
        place.has_drawn = lambda: state_of(generator) != fresh
        self._note(place, seed)

    def _note(self, place: _Place, seed: int) -> None:
        place.has_others = place.seed not in (None, seed)
        place.seed = seed
        place.events += 1
        watch, lanes = self._watch, self._watch.lanes
        step, evaluated = lanes.steps, lanes.spent[EVALUATION]
        if place.optimizers != len(watch.optimizers):  # another training with the same numbers
            place.steps.clear()
        # Judged after the step, since a model may be evaluated or an optimizer made until then.
        watch.at(step + 1, partial(self._judge, place, step, evaluated))

    def _judge(self, place: _Place, step: int, evaluated: int) -> None:
        is_new = place.optimizers != len(self._watch.optimizers)
        place.optimizers = len(self._watch.optimizers)
        if is_new:
            place.steps.clear()
        if self._watch.lanes.spent[EVALUATION] == evaluated and step not in place.steps[-1:]:
            place.steps.append(step)

    def results(self) -> list[RepeatedSeed]:
        """Return the lines whose numbers repeat."""
        return [
            RepeatedSeed(place.kind, place.site, place.steps)
            for place in self._places.values()
            if len(place.steps) > 1 and not place.has_others
        ]


def _of_process(name: str) -> Callable[[Any], int]:
    def state(_: Any) -> int:
        return states_of_process().get(name, 0)

    return state
