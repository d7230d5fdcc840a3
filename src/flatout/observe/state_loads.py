"""Loads of weights that have no effect.

There are two cases. With `strict=False`, a state dict may have none of the model's names. A state
dict that was not copied holds the model's own tensors: these change with each step, and loading
them back changes nothing.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import ref

from flatout.hooks import wrap
from flatout.observe.kept_states import loaded_later
from flatout.observe.model_facts import local
from flatout.observe.observation import Site, StateLoad
from flatout.observe.replicas import number_of
from flatout.observe.sites import here, is_users
from flatout.observe.watch import Watch

# Maximum number of calls of each line that are checked: some scripts save or copy weights in each
# step.
_LOOKS = 16
# Maximum number of tensors that are hashed to detect a change. (Fused optimizers do not increase
# versions.)
_TENSORS = 8
# Maximum number of names that are recorded.
_NAMED = 3


@dataclass(frozen=True)
class _Stamp:
    """State of a module: number of steps and of loads, and a hash of the weights."""

    steps: int
    loads: int
    weights: int

    def is_before(self, now: _Stamp) -> bool:
        has_passed = now.steps > self.steps or now.loads > self.loads
        return has_passed and now.weights != self.weights


@dataclass(frozen=True)
class _Taken:
    """A state dict that the script has taken.

    Attributes:
        ref, owner: weak references to the dict and to its module.
        site: line where it was taken.
        stamp: the module's state at that time.
    """

    ref: Any
    owner: Any
    site: Site
    stamp: _Stamp


class StateLoads:
    """Tracker of state dicts, from where they are taken to where they are loaded."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._watch = watch
        self._told: list[tuple[StateLoad, Any]] = []  # findings, with the module
        self._taken: dict[int, _Taken] = {}
        # By module id, since some modules are unhashable.
        self._last: dict[int, _Taken] = {}
        self._loads: Counter[int] = Counter()
        self._looks: Counter[tuple[int, int]] = Counter()
        wrap(torch.nn.Module, "state_dict", "observe", self._taking)
        wrap(torch.nn.Module, "load_state_dict", "observe", self._loading)

    @property
    def found(self) -> list[StateLoad]:
        """Findings, one for each line."""
        return [replace(item) for item, _ in self._told]

    # -- events -----------------------------------------------------------------------------------

    def _taking(self, original: Any) -> Any:
        lanes = self._watch.lanes

        def state_dict(module: Any, *args: Any, **kwargs: Any) -> Any:
            taken = original(module, *args, **kwargs)
            is_inner = args or "destination" in kwargs  # a recursive call for a submodule
            if not is_inner and get_ident() == lanes.thread:
                if self._is_looked_at(sys._getframe(1)):
                    self._watch.aside(partial(self._take, module, taken, here(1)))
                else:
                    self._last.pop(id(module), None)  # the latest state dict is then unknown
            return taken

        return state_dict

    def _loading(self, original: Any) -> Any:
        lanes = self._watch.lanes

        def load_state_dict(module: Any, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if get_ident() != lanes.thread:
                return original(module, *args, **kwargs)
            # Loads by libraries, such as of parts of a model, are not checked.
            is_seen = is_users(frame.f_code.co_filename) and self._is_looked_at(frame)
            given: Any = args[0] if args else kwargs.get("state_dict")
            site = here(1) if is_seen and isinstance(given, Mapping) else None
            names = list(given) if site else []
            if site is not None:
                self._watch.aside(partial(self._loads_own, module, given, site))
            result = original(module, *args, **kwargs)
            self._loads[id(module)] += 1
            if site is not None:
                self._watch.aside(partial(self._has_loaded, module, names, result, site))
            return result

        return load_state_dict

    def _is_looked_at(self, frame: FrameType) -> bool:
        key = id(frame.f_code), frame.f_lasti
        self._looks[key] += 1
        return self._looks[key] <= _LOOKS

    # -- the model's own tensors ------------------------------------------------------------------

    def _now(self, module: Any) -> _Stamp:
        trained = [local(one) for one in module.parameters() if _has_values(one)]
        loads = self._loads[id(module)]
        return _Stamp(self._watch.lanes.steps, loads, number_of(trained[:_TENSORS]))

    def _take(self, module: Any, state: Any, site: Site | None) -> None:
        if site is None or not isinstance(state, OrderedDict):  # a custom class of state dict
            self._last.pop(id(module), None)
            return
        taken = self._last[id(module)] = _Taken(ref(state), ref(module), site, self._now(module))
        for number in [key for key, old in self._taken.items() if old.ref() is None]:
            del self._taken[number]
        self._taken[id(state)] = taken
        if self._watch.optimizers and not self._is_told(site):
            after = self._watch.lanes.steps + 1
            self._watch.at(after, partial(self._outlives, taken), is_once=True)

    def _is_told(self, site: Site) -> bool:
        return any(site in (item.site, item.taken_at) for item, _ in self._told)

    def _outlives(self, taken: _Taken) -> None:
        state, module = taken.ref(), taken.owner()
        if state is None or module is None or self._is_told(taken.site):
            return
        loaded_at = loaded_later(taken.site)
        now = self._now(module)
        if loaded_at is not None and taken.stamp.is_before(now) and _is_own(state, module):
            self._tell("kept", module, loaded_at, taken, now)

    def _loads_own(self, module: Any, state: Any, site: Site) -> None:
        if not _is_own(state, module):
            return
        taken = self._taken.get(id(state))
        # A dict that was made from a state dict has the same tensors: then assume the latest state
        # dict.
        if taken is None or taken.ref() is not state:
            taken = self._last.get(id(module))
        now = self._now(module)
        if taken is not None and taken.owner() is module and taken.stamp.is_before(now):
            self._told = [
                told
                for told in self._told
                if (told[0].kind, told[0].taken_at) != ("kept", taken.site)
            ]
            if not self._is_told(site):
                self._tell("own", module, site, taken, now)

    def _tell(self, kind: str, module: Any, site: Site, taken: _Taken, now: _Stamp) -> None:
        model, many = type(module).__name__, sum(1 for _ in module.parameters())
        steps = now.steps - taken.stamp.steps
        item = StateLoad(kind, model, many, site, taken.site, steps)
        self._told.append((item, ref(module)))

    # -- state dicts without a matching name ------------------------------------------------------

    def _has_loaded(self, module: Any, given: list[str], result: Any, site: Site) -> None:
        own = [name for name, _ in module.named_parameters()]
        missing = set(getattr(result, "missing_keys", ()))
        unexpected = set(getattr(result, "unexpected_keys", ()))
        if not own or not (missing.issuperset(own) and unexpected.issuperset(given)):
            self._told = [
                told
                for told in self._told
                if told[0].kind != "unmatched" or told[1]() is not module
            ]
        elif not self._is_told(site):
            item = StateLoad("unmatched", type(module).__name__, len(own), site)
            item.given, item.wanted = given[:_NAMED], own[:_NAMED]
            self._told.append((item, ref(module)))


def _has_values(parameter: Any) -> bool:
    return parameter.requires_grad and not parameter.is_meta


def _is_own(state: Any, module: Any) -> bool:
    shared = [(state[name], own) for name, own in module.named_parameters() if name in state]
    return bool(shared) and all(
        hasattr(given, "data_ptr") and given.data_ptr() == own.data_ptr() != 0
        for given, own in shared
        if own.numel()
    )
