"""Schedulers of learning rates: how often they are stepped, and when their rate has ended."""

from __future__ import annotations

from threading import get_ident
from typing import Any
from weakref import ref

from flatout.hooks import Hook, wrap
from flatout.observe.observation import Schedule, Site
from flatout.observe.rate_curves import ends_after, made_for
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Calls are seen in so many steps; how many there were in all they say themselves.
_STEPS = 8


class _Watched:
    def __init__(self, scheduler: Any, site: Site | None) -> None:
        self.ref = ref(scheduler)
        self.facts = Schedule(type(scheduler).__name__, site)
        self.begins_at = int(scheduler.last_epoch)


class Schedules:
    """Watches torch's schedulers."""

    def __init__(self, module: Any, watch: Watch) -> None:
        self._watch = watch
        self._watched: list[_Watched] = []
        self._hook: Hook | None = None
        self._owner = module.LRScheduler
        wrap(self._owner, "__init__", "observe", self._made)
        # It makes itself without the class that it inherits from. When it is stepped first is not
        # looked at: no rate is left out where that comes before the optimizer.
        wrap(module.ReduceLROnPlateau, "__init__", "observe", self._made)
        self.watch()
        watch.at(_STEPS, self._end)
        watch.on_renewal.append(self._begin)

    def _begin(self) -> None:
        for schedule in self._watched:
            scheduler = schedule.ref()
            schedule.facts = Schedule(schedule.facts.kind, schedule.facts.site)
            schedule.begins_at = 0 if scheduler is None else int(scheduler.last_epoch)
        self.watch()

    def watch(self) -> None:
        """Sees calls from now on."""
        if self._hook is None:
            self._hook = wrap(self._owner, "step", "observe", self._stepped)

    def _end(self) -> None:
        if self._hook is not None and self._hook.remove():
            self._hook = None

    def _made(self, original: Any) -> Any:
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            if get_ident() == self._watch.lanes.thread:
                self._watched.append(_Watched(scheduler, here(1)))

        return init

    def _stepped(self, original: Any) -> Any:
        lanes = self._watch.lanes

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            if getattr(scheduler, "_is_initial", False) or get_ident() != lanes.thread:
                return
            for schedule in self._watched:
                if schedule.ref() is scheduler and schedule.facts.first_after is None:
                    schedule.facts.first_after = lanes.steps
                    schedule.facts.stepped_at = here(1)

        return step

    def results(self) -> list[Schedule]:
        """What was seen of those that still exist, but for parts of another one."""
        result = []
        alive = [
            (item, scheduler) for item in self._watched if (scheduler := item.ref()) is not None
        ]
        parts = {id(part) for _, whole in alive for part in getattr(whole, "_schedulers", ())}
        optimizers = [optimizer.ref() for optimizer in self._watch.optimizers]
        for item, scheduler in alive:
            if id(scheduler) in parts:
                continue
            facts = item.facts
            facts.steps = int(scheduler.last_epoch) - item.begins_at
            facts.ends_after, facts.made_for = ends_after(scheduler), made_for(scheduler)
            facts.is_used = any(scheduler.optimizer is used for used in optimizers)
            result.append(facts)
        return result
