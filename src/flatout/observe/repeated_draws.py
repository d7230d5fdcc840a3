"""Random numbers that a line draws from a `torch.Generator` again, as in an earlier step or epoch.

This happens where the generator is seeded again in between. Generators cannot be hooked, so the
functions that draw are hooked. A repetition is found where a draw leaves the generator in a state
that an earlier draw of the same line has left. Drawn data are not reported, since their repetition
may be intended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from threading import get_ident
from types import FrameType
from typing import Any

from flatout.hooks import Hook, when_imported, wrap
from flatout.kernels import EVALUATION
from flatout.observe.graph_nodes import nearest_nodes
from flatout.observe.lanes import INPUT
from flatout.observe.observation import RepeatedSeed, Site
from flatout.observe.sites import is_users, line_of
from flatout.observe.watch import Watch

_FUNCTIONS = (
    "bernoulli", "binomial", "multinomial", "normal", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like",
)  # fmt: skip
_METHODS = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
    "multinomial", "normal_", "random_", "uniform_",
)  # fmt: skip
# _PLACES: maximum number of lines that are recorded; _STATES: maximum number of states recorded of
# each line; _EVENTS: maximum number of repeated states of a line, after which its draws are no
# longer checked.
_PLACES, _STATES, _EVENTS = 64, 64, 64
# Number of a line's draws that are skipped per checked draw, once _STATES states are known.
_LEFT_OUT = 15
# Steps after which draws are no longer hooked, if the script drew from no generator of its own.
_UNUSED_STEPS = 64
# _FIRST: number of first states of a line whose draws are compared with data; _HELD: maximum number
# of tensors kept for that comparison.
_FIRST, _HELD = 8, 16
# _ROWS: number of rows of a batch that are searched among the drawn rows; _TABLE: maximum number of
# drawn rows of a tensor; _NODES: maximum number of nodes of a loss's graph.
_ROWS, _TABLE, _NODES = 4, 2**14, 64
# Smallest correlation with a drawn tensor for data to count as a scaled copy of it.
_ALIKE = 0.999
# Function in torch._dynamo.trace_rules that lists torch's functions for torch.compile.
_LISTED = "get_torch_obj_rule_map"
_LOSSES = ("NllLossBackward0", "MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0")


@dataclass(eq=False)
class _Draws:
    """A user's line that draws from a generator.

    Attributes:
        seeds: by state after a draw, the seed of the generator.
        steps: by state, the steps in which a draw left the generator in this state and did not
            serve an evaluation.
        optimizers: by state, the number of optimizers that existed when the state was last
            recorded.
        events: number of repeated states.
        is_data: whether the whole input of a model, or the target of a loss, was drawn by the line
            or by the same generator.
        drawn_at: by state, the step in which a draw within a loader left the generator in this
            state.
        is_of_loader: whether the line draws while a loader makes a batch.
        is_alike: whether a draw within a loader left the same state twice in one step.
        draws: number of draws by the line.
    """

    kind: str
    site: Site
    seeds: dict[int, int] = field(default_factory=dict)
    steps: dict[int, list[int]] = field(default_factory=dict)
    optimizers: dict[int, int] = field(default_factory=dict)
    events: int = 0
    is_data: bool = False
    drawn_at: dict[int, int] = field(default_factory=dict)
    is_of_loader: bool = False
    is_alike: bool = False
    draws: int = 0

    def wants(self, generator: Any) -> bool:
        self.draws += 1
        if self.events >= _EVENTS:
            return False
        if len(self.steps) < _STATES:
            return True
        is_due = not self.draws % (1 + _LEFT_OUT)
        return is_due and generator.initial_seed() in self.seeds.values()

    @property
    def repeated(self) -> int | None:
        is_meant = len({*self.seeds.values()}) > 1 or (self.is_of_loader and not self.is_alike)
        state = max(self.steps, key=lambda state: len(self.steps[state]), default=None)
        if state is None or is_meant or self.is_data or len(self.steps[state]) < 2:
            return None
        return state


class RepeatedDraws:
    """Record of draws from generators."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._hooks: list[Hook] = []
        self._is_over = False
        self._begin()
        watch.on_renewal.append(self._renew)
        watch.on_training.append(self._again)
        watch.at_each(_UNUSED_STEPS, self._rest)
        watch.quick.on_end.append(self._end)
        watch.on_batch.append(self._called)
        watch.before_backward.append(self._compared)
        self._enter()
        when_imported("torch._dynamo.trace_rules", self._hook_rules)

    def _enter(self) -> None:
        scripted = _scripted_functions()
        for owner, names, words in (
            (self._torch, _FUNCTIONS, "torch"),
            (self._torch.Tensor, _METHODS, "torch.Tensor"),
        ):
            for name in names:
                self._hooks.append(wrap(owner, name, "observe", self._drawing, f"{words}.{name}"))
                if words == "torch":
                    scripted[id(getattr(owner, name))] = f"aten::{name}"

    def _rest(self) -> None:
        watch = self._watch
        if not self._places and watch.lanes.steps >= watch.began + _UNUSED_STEPS:
            self._leave()

    def _again(self) -> None:
        if not (self._hooks or self._is_over):
            self._enter()

    def _renew(self) -> None:
        self._begin()
        self._again()

    def _begin(self) -> None:
        self._places: dict[tuple[str, str, int], _Draws] = {}
        self._held: list[tuple[Any, _Draws, Any]] = []  # generator, line and drawn tensor
        self._inputs: list[_Draws] = []  # lines that drew a model's whole input in this step
        self._other_at = -1  # latest step in which a model's input was not drawn

    def _hook_rules(self, rules: Any) -> None:
        def listing(original: Any) -> Any:
            def listed() -> Any:
                was_there = bool(self._hooks)
                self._leave()
                try:
                    return original()
                finally:
                    if was_there and not self._is_over:
                        self._enter()

            listed.cache_clear = original.cache_clear  # type: ignore[attr-defined]
            return listed

        if hasattr(getattr(rules, _LISTED, None), "cache_clear"):
            wrap(rules, _LISTED, "observe", listing)
        else:
            self._end()  # an unknown version of torch

    def _leave(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _end(self) -> None:
        self._is_over = True
        self._leave()

    def _drawing(self, original: Any, kind: str) -> Any:
        def draw(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            generator = kwargs.get("generator")
            if generator is not None and self._watch.lanes.thread == get_ident():
                # A draw without gradients serves display or evaluation, or initializes weights.
                place = self._place(kind) if self._torch.is_grad_enabled() else None
                if place is not None and place.wants(generator):
                    self._watch.aside(partial(self._drawn, place, generator, result))
            return result

        return draw

    def _place(self, kind: str) -> _Draws | None:
        frame: FrameType = sys._getframe(2)
        if not is_users(frame.f_code.co_filename):
            return None
        key = kind, frame.f_code.co_filename, line_of(frame)
        place = self._places.get(key)
        if place is None and len(self._places) < _PLACES:
            place = self._places[key] = _Draws(kind, Site(*key[1:]))
        return place

    def _drawn(self, place: _Draws, generator: Any, result: Any) -> None:
        device = generator.device.type
        if type(result) is not self._torch.Tensor or device not in ("cpu", "cuda"):
            return
        if device == "cuda" and self._torch.cuda.is_current_stream_capturing():
            return  # the generator's state is unknown while a CUDA graph is captured
        state = hash(generator.get_state().numpy().tobytes())
        is_new = state not in place.steps
        if is_new and len(place.steps) >= _STATES:
            return
        steps = place.steps.setdefault(state, [])
        place.seeds[state] = generator.initial_seed()
        if is_new and len(place.steps) > _FIRST:
            return
        place.events += not is_new
        self._note_loader(place, state)
        if is_new and len(self._held) < _HELD:
            self._held.append((generator, place, result.detach()))
        lanes = self._watch.lanes
        step, evaluated = lanes.steps, lanes.spent[EVALUATION]
        if place.optimizers.get(state) not in (None, len(self._watch.optimizers)):
            steps.clear()  # another training with the same numbers
        # Judged after the step, since a model may be evaluated or an optimizer made until then.
        self._watch.at(step + 1, partial(self._judge, place, state, step, evaluated), is_once=True)

    def _note_loader(self, place: _Draws, state: int) -> None:
        lanes = self._watch.lanes
        if lanes.current == INPUT:
            place.is_alike |= place.drawn_at.get(state) == lanes.steps
            place.is_of_loader = True
            place.drawn_at[state] = lanes.steps

    def _judge(self, place: _Draws, state: int, step: int, evaluated: int) -> None:
        if self._other_at != step:
            # An image generator's only input is noise, but its discriminator gets other images.
            for one in self._inputs:
                one.is_data = True
        self._held.clear()
        self._inputs.clear()
        steps, optimizers = place.steps[state], len(self._watch.optimizers)
        if place.optimizers.get(state) not in (None, optimizers):
            steps.clear()
        place.optimizers[state] = optimizers
        if self._watch.lanes.spent[EVALUATION] == evaluated and step not in steps[-1:]:
            steps.append(step)

    def _called(self, model: Any, batch: Any, is_trained: bool) -> None:
        if is_trained and type(batch) is self._torch.Tensor:
            found = [*self._drawn_beside(batch)]
            self._inputs += found
            if not found and batch.grad_fn is None:
                self._other_at = self._watch.lanes.steps

    def _compared(self, tensors: Any) -> None:
        if not self._held:
            return
        for root in [tensors] if self._torch.is_tensor(tensors) else list(tensors):
            for node in nearest_nodes(root.grad_fn, _NODES) if root.grad_fn is not None else ():
                target = node._saved_target if node.name() in _LOSSES else None
                if target is not None:
                    for place in self._drawn_beside(target):
                        place.is_data = True

    def _drawn_beside(self, data: Any) -> Iterator[_Draws]:
        drawn: dict[_Draws, list[Any]] = {}
        for _, place, tensor in self._held:
            drawn.setdefault(place, []).append(tensor)
        known = {p for p, some in drawn.items() if _are_drawn(self._torch, data.detach(), some)}
        generators = {id(generator) for generator, place, _ in self._held if place in known}
        return (place for generator, place, _ in self._held if id(generator) in generators)

    def results(self) -> list[RepeatedSeed]:
        """Return the lines that draw the same numbers again."""
        return [
            RepeatedSeed(place.kind, place.site, place.steps[state], place.seeds[state])
            for place in self._places.values()
            if (state := place.repeated) is not None
        ]


def _scripted_functions() -> dict[int, str]:
    try:
        builtins: Any = import_module("torch.jit._builtins")
        table: dict[int, str] = builtins._get_builtin_table()
    except (ImportError, AttributeError):  # an unknown version of torch
        return {}
    return table


def _are_drawn(torch: Any, data: Any, drawn: list[Any]) -> bool:
    storages = {tensor.untyped_storage().data_ptr() for tensor in drawn}
    if data.untyped_storage().data_ptr() in storages:
        return True
    flat = data.reshape(-1)
    pools = [t.reshape(-1) for t in drawn if t.device == data.device and t.numel()]
    if not pools or not len(flat):
        return False
    if any(len(flat) == len(pool) and bool((flat == pool).all()) for pool in pools):
        return True
    if not drawn[0].is_floating_point():  # class indices, drawn for more samples than a batch has
        return any(len(pool) >= 2 * len(flat) and _are_in(torch, flat, pool) for pool in pools)
    if not data.is_floating_point():
        return False
    columns = len(flat) // len(data) if data.dim() else 1
    rows = data.reshape(-1, columns)[:_ROWS]
    if any(len(flat) == len(pool) > 2 and _are_alike(torch, flat, pool) for pool in pools):
        return True
    tables = [pool.reshape(-1, columns)[:_TABLE] for pool in pools if not len(pool) % columns]
    if not tables or not bool((rows % 1).any()):
        return False
    table = torch.cat(tables)
    return all(bool((table == row).all(1).any()) for row in rows)


def _are_in(torch: Any, flat: Any, pool: Any) -> bool:
    return bool(torch.isin(flat, pool).all())


def _are_alike(torch: Any, flat: Any, pool: Any) -> bool:
    correlation = torch.corrcoef(torch.stack([flat.double(), pool.double()]))[0, 1]
    return bool(correlation.abs() > _ALIKE)
