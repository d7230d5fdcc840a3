"""Schedulers of learning rates: how often they are stepped, and when their rate has ended."""

from __future__ import annotations

from threading import get_ident
from typing import Any
from weakref import ref

from flatout.hooks import Hook, wrap
from flatout.observe.observation import Schedule, Site
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Calls are seen in so many steps; how many there were in all they say themselves.
_STEPS = 8
# So far ahead is looked for the end of a rate: longer ones are made for steps.
_AHEAD = 2000
# Share of the first rate that is as good as none.
_NOTHING = 0.02


class _Seen:
    def __init__(self, scheduler: Any, site: Site | None) -> None:
        self.ref = ref(scheduler)
        self.facts = Schedule(type(scheduler).__name__, site)
        self.begins_at = int(scheduler.last_epoch)


class Schedules:
    """Watches torch's schedulers."""

    def __init__(self, module: Any, watch: Watch) -> None:
        self._watch = watch
        self._seen: list[_Seen] = []
        self._hook: Hook | None = None
        self._owner = module.LRScheduler
        wrap(self._owner, "__init__", "observe", self._made)
        self.watch()
        watch.at(_STEPS, self._end)
        watch.on_renewal.append(self._begin)

    def _begin(self) -> None:
        for schedule in self._seen:
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
                self._seen.append(_Seen(scheduler, here(1)))

        return init

    def _stepped(self, original: Any) -> Any:
        lanes = self._watch.lanes

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            if getattr(scheduler, "_is_initial", False) or get_ident() != lanes.thread:
                return
            for schedule in self._seen:
                if schedule.ref() is scheduler and schedule.facts.first_after is None:
                    schedule.facts.first_after = lanes.steps
                    schedule.facts.stepped_at = here(1)

        return step

    def results(self) -> list[Schedule]:
        """What was seen of those that still exist."""
        result = []
        for schedule in self._seen:
            scheduler = schedule.ref()
            if scheduler is None:
                continue
            schedule.facts.steps = int(scheduler.last_epoch) - schedule.begins_at
            schedule.facts.ends_after = _ends_after(scheduler)
            optimizers = [optimizer.ref() for optimizer in self._watch.optimizers]
            schedule.facts.is_used = any(scheduler.optimizer is used for used in optimizers)
            result.append(schedule.facts)
        return result


def _ends_after(scheduler: Any) -> int | None:
    """After how many of its steps the rate is as good as nothing; None where it never is, or where
    the scheduler has no formula for it."""
    rate_of = getattr(scheduler, "_get_closed_form_lr", None)
    first = [float(rate) for rate in scheduler.base_lrs]
    if rate_of is None or not first or not first[0]:
        return None
    kept = scheduler.last_epoch
    try:
        for step in range(_AHEAD):
            scheduler.last_epoch = step
            if step and float(rate_of()[0]) <= _NOTHING * first[0]:
                return step
    finally:
        scheduler.last_epoch = kept
    return None
