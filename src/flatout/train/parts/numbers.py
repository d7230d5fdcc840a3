"""Checks that the gradients of each step are finite, and finds the batch with a bad gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from flatout.data import Batch, Source
from flatout.data.ranked import Share, ranked
from flatout.errors import NumbersError
from flatout.train import guard
from flatout.train.losses.loss_value import Compute
from flatout.train.part import Done, Part, Step
from flatout.train.snapshot import untouched
from flatout.train.step import Stepper, placed
from flatout.world import ONE, World


class StepFacts(NamedTuple):
    """The facts that are needed to repeat a step.

    Attributes:
        number: number of the step, from 1.
        epoch: number of its epoch.
        first_batch: the number of its first batch within the epoch.
        batches: number of batches in the step.
        rate: learning rate of the step.
    """

    number: int
    epoch: int
    first_batch: int
    batches: int
    rate: float


class NumbersGuard(Part):
    """Checks the flag of each update: at once on a CPU, elsewhere every few steps."""

    def __init__(
        self,
        stepper: Stepper,
        world: World,
        ready: Callable[[Batch], Batch],
        latest: Callable[[int], StepFacts],
        source: Callable[[], Source | None],
    ) -> None:
        self._stepper, self._source = stepper, source
        self._world = world
        self._ready = ready
        self._latest = latest
        self._reads_are_free = stepper.switch.device.type == "cpu"
        # Flags of updates that are on the device and not read yet.
        self._unread: list[tuple[StepFacts, torch.Tensor, Compute]] = []

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step.

        Raises:
            NumbersError: gradients were not finite, in this step or, on a GPU, in an earlier step.
        """
        done = run(step)
        self.check_step(step)
        return done

    def check_step(self, step: Step) -> None:
        """Check the gradients of a finished step: at once if reading their flag is free."""
        update, facts = step.turn.update, self._latest
        if self._reads_are_free:
            if update.was_bad():
                raise self._explain(step.compute, step.batches, facts(len(step.batches)))
        elif update.flag is not None:
            self._unread.append((facts(len(step.batches)), update.flag.clone(), step.compute))
            if len(self._unread) >= guard.EVERY:
                unread, self._unread = self._unread, []
                self._read(unread, None)

    def check(self, compute: Compute | None = None) -> None:
        """Read the flags that are still unread, and check the weights for NaN and infinity."""
        unread, self._unread = self._unread, []
        if unread:
            self._read(unread, compute)
        switch, made = self._stepper.switch, self._latest(0).number - 1
        if made:
            tables = [table for rows in switch.rows.values() for table in rows.weights]
            guard.check_updates(switch.model, self._stepper.joint.optimizers, made, tables)

    def _read(
        self,
        unread: Sequence[tuple[StepFacts, torch.Tensor, Compute]],
        compute: Compute | None,
    ) -> None:
        flags = torch.stack([flag for _, flag, _ in unread]).tolist()
        for (step, _, own), was_bad in zip(unread, flags, strict=True):
            if was_bad:
                raise self._explain(compute or own, self._fetch_again(step), step)

    def _fetch_again(self, step: StepFacts) -> list[Batch]:
        source = self._source()
        if source is None or not source.seekable:
            return []
        whole = self._stepper.strategy.takes_whole_batches
        own = ranked(source, self._world.rank, self._world.size, _share_of, whole=whole)
        again = own.batches(step.epoch, step.first_batch)
        return [self._ready(batch) for batch in islice(again, step.batches)]

    def _explain(self, compute: Compute, batches: Sequence[Batch], step: StepFacts) -> NumbersError:
        stepper, batches = self._stepper, placed(batches)
        stepper.switch.gather_rows()  # from here on each rank computes alone
        model, within = stepper.switch.model, stepper.chain.forward(compute)

        def forward(batch: Batch) -> Any:
            with stepper.switch.autocast():
                return within(batch)

        # If each rank steps alone, other ranks do not call this.
        world = ONE if stepper.strategy.steps_apart else self._world
        together = world if stepper.strategy.meets_in_compute else ONE

        def pieces(batch: Batch) -> int:
            if together.size > 1:
                return stepper.pieces_on_all_ranks(batch)
            return stepper.wanted_pieces(batch)

        def explain(_: Step) -> NumbersError:
            # Take the first batch with a bad loss; if only a gradient is bad, take the first batch
            # of the step.
            culprit = next(iter(batches), None)
            if len(batches) > 1:
                with untouched(model, compute), stepper.forward_alone():
                    for batch in batches:
                        are_finite = [_is_finite(forward(p)) for p in batch.split(pieces(batch))]
                        if not all(
                            together.gather(all(are_finite), "the first bad batch of a step")
                        ):
                            culprit = batch
                            break
            return guard.explain_bad_step(
                model,
                forward,
                culprit,
                optimizers=stepper.joint.optimizers,
                is_first=step.number == 1,
                step=step.number,
                learning_rate=step.rate,
                held_back=stepper.update.gated,
                pieces=1 if culprit is None else pieces(culprit),
                world=world,
                together=together,
            )

        again = Step(step.number, batches, compute, stepper.turn)
        return stepper.chain.repeat(again, explain)


def _share_of(batch: Batch) -> Share:
    return "own" if batch.is_jagged else "part"


def _is_finite(value: Any) -> bool:
    loss = value[0] if isinstance(value, tuple) else value
    return bool(torch.isfinite(loss).all())
