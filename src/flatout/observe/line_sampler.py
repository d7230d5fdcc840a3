"""User's lines that steps spend time on, sampled by a native thread (`kernels/stacks/stacks.c`).

Where no DataLoader gives the batches, the time of the lines that make the batches is the input
lane.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType

from flatout.hooks import wrap
from flatout.kernels import stacks_of
from flatout.observe.lanes import EVALUATION, HOST, INPUT
from flatout.observe.lines import Lines
from flatout.observe.observation import Observation, Site
from flatout.observe.origins import origins
from flatout.observe.record import NO_LOADER
from flatout.observe.stacks import Places, Stack, codes, stacks_in
from flatout.observe.watch import Watch

# Minimum number of samples from which lines are reported.
_FEWEST = 50
# Largest time of a line that only evaluates, as a multiple of the evaluation lane's time.
_LARGEST = 2.0


class LineSampler:
    """Sampler of the stepping thread's stacks from the first step on; to be made in that thread."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._stacks = stacks_of(watch.lanes)
        if self._stacks is None:
            return
        self._outer: list[CodeType] = []
        self._frozen: list[CodeType] = []
        wrap(gc, "freeze", "observe", self._freezing)
        watch.at(1, self._begin)
        watch.on_renewal.append(self._stacks.renew)

    def _freezing(self, original: Callable[[], None]) -> Callable[[], None]:
        def look() -> None:
            self._frozen = list(codes(self._frozen).values())

        def freeze() -> None:
            if get_ident() == self._watch.lanes.thread:
                self._watch.aside(look)
            else:
                look()
            original()

        return freeze

    def _begin(self) -> None:
        assert self._stacks is not None
        # Keep these code objects: no function holds those of a script after it has ended.
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            self._outer.append(frame.f_code)
            frame = frame.f_back
        self._stacks.start()

    def stop(self) -> None:
        """Stop sampling; the samples are kept."""
        if self._stacks is not None:
            self._stacks.stop()

    @property
    def seconds(self) -> float:
        """CPU seconds that sampling has taken."""
        return 0.0 if self._stacks is None else self._stacks.cpu_ns / 1e9

    def fill(self, observation: Observation) -> None:
        """Add the sampled lines to an Observation; not to be called while steps go on."""
        if self._stacks is None:
            observation.notes.append("lines: this Python's frames cannot be read from beside it")
            return
        models = list(self._watch.models)
        stacks = list(stacks_in(self._stacks.seen(), codes([*self._outer, *self._frozen])))
        samples = sum(stack.samples for stack in stacks)
        if samples < _FEWEST:
            observation.notes.append(
                f"lines: {samples} samples of the script are too few to tell its lines"
            )
            return
        lanes = [ms or 0.0 for ms in observation.lanes_ms.values()]
        share = (observation.lanes_ms.get("evaluation") or 0.0) / max(sum(lanes), 1e-9)
        for model in models:
            if model.evaluated_at:
                _move_evaluation(stacks, _place(model.evaluated_at), share)
        if observation.lanes_ms.get("input") is None:
            called = {_place(model.site) for model in models if model.is_stepped and model.site}
            if _made_input(stacks, called):
                _share_input(stacks, observation)
        lines = Lines(stacks, observation.lanes_ms, observation.steps, self._stacks.steps_per_bin)
        observation.lines, observation.explained = lines.most(), lines.explained


def _place(site: Site) -> tuple[str, int]:
    return site.file, site.line


def _move_evaluation(stacks: list[Stack], call: tuple[str, int], share: float) -> None:
    beneath = [stack for stack in stacks if call in stack.users]
    result = sum(sum(stack.ns) for stack in beneath) / max(
        sum(sum(stack.ns) for stack in stacks), 1e-9
    )
    if result > _LARGEST * share:
        return
    for stack in beneath:
        moved, stack.ns = sum(stack.ns), [0.0] * len(stack.ns)
        stack.ns[EVALUATION] = moved


def _made_input(stacks: list[Stack], called: set[tuple[str, int]]) -> bool:
    makes: set[tuple[str, int]] = set()
    for call in called:
        result = Counter[Places]()
        for stack in stacks:
            if call in stack.users:
                result[stack.users[stack.users.index(call) + 1 :]] += stack.samples
        # The host time within the call itself is spent on making its arguments.
        makes |= {call} | origins(call, result.most_common(1)[0][0] if result else ())
    moved = 0.0
    for stack in stacks:
        if not makes.isdisjoint(stack.users):
            moved += stack.ns[HOST]
            stack.ns[INPUT] += stack.ns[HOST]
            stack.ns[HOST] = 0.0
    return moved > 0


def _share_input(stacks: list[Stack], observation: Observation) -> None:
    made, left = (sum(stack.ns[lane] for stack in stacks) for lane in (INPUT, HOST))
    whole = observation.lanes_ms.get("host") or 0.0
    input_ms = whole * made / max(made + left, 1.0)
    observation.lanes_ms["input"], observation.lanes_ms["host"] = input_ms, whole - input_ms
    observation.notes[:] = [note for note in observation.notes if note != NO_LOADER]
    observation.notes.append(
        "input: no DataLoader gave the batches; it is the time of lines that made them"
    )
