"""Settings for a job whose set of training parameters has changed.

The settings are decided again for the remaining steps, as before the first step: from the cache, or
by a search on the steps, under a key of their own. If the rest of the run is too short for a
search, the earlier settings stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flatout.data import Batch, Features
from flatout.models import adapter_of, has_compiled
from flatout.recipe import Recipe, ResolvedRecipe, dumps, loads
from flatout.train.decide import asked_here
from flatout.train.graphs.graphs import graphs_of
from flatout.train.loop_state import LoopState
from flatout.train.losses.loss_value import Compute
from flatout.train.part import Done, Part, Step
from flatout.train.settings import FIELDS, LIVE, Settings
from flatout.train.start_tuning import capture_steps, settle, tune
from flatout.train.tuning import auto
from flatout.train.tuning.budget import Budget
from flatout.train.tuning.first_check import KnownStep
from flatout.train.tuning.search import Search

OTHER = "other parameters train than before"


class OtherJob(Part):
    """Detects that a Loop's job differs from the one that its settings were decided for.

    It sets the Loop's `is_other_job` if settings are to be decided again at the next step, and
    counts such changes in `job_changes`.
    """

    def __init__(self, loop: LoopState, steps: int | None) -> None:
        self._loop, self._steps = loop, steps
        self._plain = loop.stepper.switch.now
        # The settings in a checkpoint belong to the job that resumes from it.
        self._begins = (
            loop.resume is not None and loop.resume.choices(loop.asked.recipe) is not None
        )
        self.taken()

    def taken(self) -> None:
        """Record that the settings were decided for the present job."""
        self._trained = self._trainable()

    def _trainable(self) -> list[bool]:
        return [p.requires_grad for p in adapter_of(self._loop.model).parameters()]

    def look(self) -> None:
        """Check for a change before an epoch; all ranks call it."""
        if self._begins:
            self.taken()
            self._begins = False
        differs = self._trainable() != self._trained
        if any(self._loop.world.gather(differs)):
            self.notice()

    def notice(self) -> None:
        """Record that the job has changed."""
        self.taken()
        self._loop.progress.job_changes += 1
        # A compiled model would be compiled again for each setting.
        self._loop.progress.is_other_job = not has_compiled(self._loop.model)

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step, under settings for the parameters that train now."""
        loop = self._loop
        if loop.progress.is_other_job:
            loop.stepper.switch.gather_rows()
            with loop.trainer.uncounted():
                self._decide(step.compute, step.batches[0])
        return run(step)

    def _decide(self, compute: Compute, batch: Batch) -> None:
        loop, stepper = self._loop, self._loop.stepper
        loop.progress.is_other_job = False
        if loop.tuner is not None:
            loop.tuner.stop(OTHER)
            loop.tuner.stop_splitting()
        before = stepper.switch.now
        # Starts from plain settings; a change of the allocator cannot be undone.
        stepper.use(self._plain.but(allocator=before.allocator, **dict(self._fixed(batch))))
        left = None if self._steps is None else max(0, self._steps - loop.step_count)
        said: list[str] = []
        decision = auto.resolve(
            self._asked(batch),
            stepper,
            compute,
            [batch],
            loop.identity.model,
            loop.asked.allow,
            left,
            said.append,
            None,
            KnownStep(0.0, loop.first_batches.seconds, loop.asked.accumulate),
            loop.world,
            loop.terms,
        )
        is_known = bool(loop.world.from_first(decision.is_known))
        if loop.world.size > 1:
            auto.agree(decision, loop.world)
        if is_known:
            result = loads(loop.world.from_first(dumps(decision.recipe)))
            assert isinstance(result, ResolvedRecipe)
            measured = {f: c for f, c in result.choices.items() if f in FIELDS.values()}
            assert loop.resolved is not None
            choices = {**loop.resolved.choices, **measured}
            loop.resolved = loop.asked.recipe.resolve(
                choices, loop.resolved.machine, loop.identity.model
            )
            self._use(Settings.of(loop.resolved))
            loop.note("; ".join([OTHER, *said]))
            if decision.search is None and loop.tuner is not None:
                # The tuner's search belongs to the previous job.
                decision.search = Search(self._plain, [], Budget(left, loop.terms), is_settled=True)
                decision.search.best = Settings.of(loop.resolved)
            if decision.search is not None:
                self._search(decision, before)
            capture_steps(loop, compute, decision.search)
        elif decision.search is None:
            self._use(before)
            compiled = graphs_of(stepper).compiled
            if compiled is not None and loop.asked.recipe.compute.capture != "on":
                compiled.give_up(f"{OTHER}, and too few steps are left")
        else:
            loop.note(f"auto: {OTHER}: settings are tried once more")
            self._search(decision, before)
            capture_steps(loop, compute, decision.search)

    def _fixed(self, batch: Batch) -> Iterator[tuple[str, Any]]:
        if isinstance(batch.inputs, Features):
            now = self._loop.stepper.switch.now
            yield from ((n, getattr(now, n)) for n, live in LIVE.items() if live.in_passes)

    def _asked(self, batch: Batch) -> Recipe:
        asked = asked_here(self._loop)
        return asked.replace({FIELDS[name]: value for name, value in self._fixed(batch)})

    def _search(self, decision: auto.Decision, before: Settings) -> None:
        loop = self._loop
        assert decision.search is not None
        assert loop.resolved is not None
        if loop.tuner is None:
            tune(loop, decision, self.notice).follows(loop.step_count, before)
        else:
            result = partial(settle, loop, decision)
            loop.tuner.begin_again(decision.search, result, loop.step_count, before)
        loop.resolved = auto.started(loop.resolved, loop.asked.recipe, decision.search)

    def _use(self, settings: Settings) -> None:
        self._loop.stepper.use(settings)
        self._loop.feed.channels_last = settings.memory_format == "channels_last"
