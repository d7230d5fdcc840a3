"""Learning rate schedulers: the number of their steps, and when their rate ends."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any
from weakref import ref

from flatout.hooks import wrap
from flatout.observe.observation import Schedule, Site
from flatout.observe.plateaus import given_at
from flatout.observe.rate_curves import ends_after, made_for
from flatout.observe.sites import here
from flatout.observe.watch import Watch


class _Watched:
    """A scheduler, with the facts that remain when it is gone."""

    def __init__(
        self, scheduler: Any, site: Site | None, gone: Callable[[int, _Watched], None]
    ) -> None:
        number = id(scheduler)
        self.ref = ref(scheduler, lambda _: gone(number, self))
        self.optimizer = ref(scheduler.optimizer)
        self.facts = Schedule(type(scheduler).__name__, site)
        self.begins_at = self.last = int(scheduler.last_epoch)
        self.is_part = self.is_known = self.is_counted = False

    def ask(self, scheduler: Any) -> None:
        """Record when the rate ends, which takes a thousand times as long as a scheduler step."""
        self.facts.ends_after, self.facts.made_for = ends_after(scheduler), made_for(scheduler)
        self.is_known = True


class Schedules:
    """Record of torch's schedulers."""

    def __init__(self, module: Any, watch: Watch) -> None:
        self._watch = watch
        self._watched: list[_Watched] = []
        self._by_id: dict[int, _Watched] = {}
        self._owner = module.LRScheduler
        wrap(self._owner, "__init__", "observe", self._made)
        # The __init__ of ReduceLROnPlateau does not call LRScheduler.__init__. A first step before
        # the optimizer's is not recorded for this class, since the class then skips no rate.
        self._plateau = module.ReduceLROnPlateau
        wrap(self._plateau, "__init__", "observe", self._made)
        wrap(self._plateau, "step", "observe", self._judging)
        wrap(self._owner, "step", "observe", self._stepped)
        watch.on_renewal.append(self._begin)

    def _begin(self) -> None:
        for item in self._watched:
            scheduler = item.ref()
            if scheduler is not None:
                item.last = int(scheduler.last_epoch)
            item.facts, item.is_known = Schedule(item.facts.kind, item.facts.site), False
            item.begins_at = item.last

    def _made(self, original: Any) -> Any:
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            if get_ident() != self._watch.lanes.thread:
                return
            for part in getattr(scheduler, "_schedulers", ()):
                if (known := self._by_id.get(id(part))) is not None:
                    known.is_part = True
            item = _Watched(scheduler, here(1), self._gone)
            # Other classes override step(): their number of steps is read while they exist.
            item.is_counted = type(scheduler).step in (self._owner.step, self._plateau.step)
            self._watched.append(item)
            self._by_id[id(scheduler)] = item

        return init

    def _gone(self, number: int, item: _Watched) -> None:
        if self._by_id.get(number) is item:
            del self._by_id[number]

    def _stepped(self, original: Any) -> Any:
        lanes, by_id = self._watch.lanes, self._by_id

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            item = by_id.get(id(scheduler))
            if item is None or get_ident() != lanes.thread:
                return
            item.last = scheduler.last_epoch
            if not item.is_known:
                item.facts.first_after, item.facts.stepped_at = lanes.steps, here(1)
                item.ask(scheduler)

        return step

    def _judging(self, original: Any) -> Any:
        lanes, by_id = self._watch.lanes, self._by_id

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            item = by_id.get(id(scheduler))
            if item is None or get_ident() != lanes.thread:
                return
            item.last = scheduler.last_epoch
            if item.facts.stepped_at is None:
                item.facts.stepped_at, item.facts.mode = here(1), str(scheduler.mode)

        return step

    def made_at(self, scheduler: Any) -> Site | None:
        """Return the line that made the scheduler; None where that was not recorded."""
        item = self._by_id.get(id(scheduler))
        return None if item is None else item.facts.site

    def results(self) -> list[Schedule]:
        """Return the facts about all schedulers.

        Parts of another scheduler are left out, and so are schedulers of other classes that no
        longer exist.
        """
        result = []
        optimizers = [optimizer.ref for optimizer in self._watch.optimizers]
        for item in self._watched:
            scheduler, facts = item.ref(), item.facts
            if item.is_part or (scheduler is None and not item.is_counted):
                continue
            if scheduler is not None:
                item.last = int(scheduler.last_epoch)
                item.ask(scheduler)
            facts.steps = int(item.last) - item.begins_at
            if facts.mode and facts.stepped_at is not None:
                facts.given, facts.given_kind = given_at(facts.stepped_at)
            facts.is_used = any(item.optimizer is used for used in optimizers)
            result.append(facts)
        return result
