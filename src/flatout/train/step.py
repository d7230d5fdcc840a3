"""One optimizer step.

    begin        drop gradients that other code has left          (optim/update.py)
    forward      compute(batch) under autocast, a mean or (sum, weight)
    backward     of the loss; of each micro-batch where the batch is split
    sums         of gradients and losses over all ranks              (strategies/)
    update       clip, check, optimizer, gradients to None        (optim/update.py)

A batch that does not fit in memory is tried again in smaller micro-batches. In a job with several
optimizers, a step is made by one of them or by several together; a turn is such a set of
optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns as clock
from typing import Any, Literal, TypeVar

import torch

from flatout.data import Batch
from flatout.measure import DeviceLanes
from flatout.models import adapter_of, is_batch_coupled
from flatout.optim import LrScale, Update, scaled
from flatout.strategies import OwnBuffers, Strategy, Sums, SyncBatchNorm
from flatout.strategies.rank_rng import rank_rng
from flatout.train.losses.loss_value import Compute, Weighing, mean_of_value, not_zero, sum_of_value
from flatout.train.losses.losses import Value
from flatout.train.micro_batch import (
    check_not_jagged,
    forget_frames,
    is_out_of_memory,
    jagged_out_of_memory,
    not_split,
    not_split_alone,
    pieces_for,
    smaller,
)
from flatout.train.objective_checks import explain_backward
from flatout.train.part import Chain, Done, Part, Step
from flatout.train.settings import Settings, Switch
from flatout.train.snapshot import Moving
from flatout.train.turn import Turns
from flatout.world import ONE, World

# Mean loss, weight of that mean, and the times of forward, backward and sync in ns. The gradients
# are in the parameters' `grad`.
_Computed = tuple[torch.Tensor, torch.Tensor | float, int, int, int]
_T = TypeVar("_T")
_NO_OTHERS = nullcontext()


@dataclass(slots=True)
class _OwnLoss:
    """The loss of this rank's forward and backward passes of a step.

    Attributes:
        is_mean: whether `total` is the mean over a whole step; if not, `total` is a sum.
        forward, backward: time of the passes without waiting for other ranks, in ns.
    """

    is_mean: bool
    total: torch.Tensor | None = None
    weight: torch.Tensor | float = 0.0
    forward: int = 0
    backward: int = 0

    def add(self, total: torch.Tensor, weight: torch.Tensor | float) -> None:
        is_first = self.total is None
        self.total = total if self.total is None else self.total + total
        self.weight = weight if is_first else self.weight + weight


class Stepper:
    """Runs optimizer steps on a model under the Settings of a Switch.

    Attributes:
        world: the ranks that train together, each on its part of the batch.
        wants_to_stop: whether this rank asks all ranks to stop after the next step.
        stopping: whether any rank has asked to stop; the same on all ranks.
        lr_scale: factors of the learning rate by the user's rule; None without a rule.
        strategy: combines the steps of all ranks.
        samples: approximate number of samples, over all ranks, in a step. It only scales the loss
            and is the same on all ranks; 0 before ranks step together.
        takes_gradients: whether the loss takes gradients itself, as a gradient penalty does.
        own_buffers: averages over ranks the buffers that modules compute from a rank's part of a
            batch; None if there are none.
        may_split: whether a batch is tried again in smaller micro-batches if memory runs out.
        frees_memory: functions that free memory of the device and return the number of freed bytes.
        lanes: puts events between the phases of a step, on a device that runs asynchronously.
        chain: the Parts that act around a step.
        turns: all turns of the job.
        joint: the turn of all optimizers together.
        turn: the turn of the present step, or of the latest.
    """

    def __init__(
        self,
        switch: Switch,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        micro_batch: str | int = "whole",
        order: Sequence[type[Part]] = (Part,),
    ) -> None:
        self.switch = switch
        self.chain = Chain(self.make, order)
        self.world = ONE
        self.wants_to_stop = self.stopping = False
        self.lr_scale: LrScale | None = None
        self.samples = 0.0
        self.takes_gradients = False
        self.own_buffers: OwnBuffers | None = None
        self.may_split = True
        self.strategy = Strategy()
        self._norms: SyncBatchNorm | None = None
        # Restores the effects of a forward pass before the step is tried again.
        self._moves: Moving | Literal[False] | None = None
        self.turns = Turns(switch, clip_norm, clip_value)
        self.joint = self.turn = self.turns.joint
        self.micro_batch = micro_batch
        self.notes: list[str] = []
        self._in_context = switch.guards_group_norms
        self.frees_memory: list[Callable[[], int]] = []
        self.lanes: DeviceLanes | None = None

    def use(self, settings: Settings) -> None:
        """Switch to other settings before the next step."""
        now = self.switch.now
        rows = settings.touched_rows != now.touched_rows
        if rows or settings.memory_format != now.memory_format:
            self.switch.gather_rows()  # a collective: all ranks switch together
        self.switch.use(settings)
        if rows:
            self.strategy.renew()
        self._in_context = settings.precision != "fp32" or self.switch.guards_group_norms
        self.strategy.micro_batches = settings.micro_batches
        self.turns.refresh()

    @property
    def is_alone(self) -> bool:
        """Whether this rank still steps alone, before ranks step together."""
        return self.world is ONE

    @property
    def update(self) -> Update:
        """Applies the gradients of the present turn."""
        return self.turn.update

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of the present turn, for fp16 only."""
        return self.turn.scaler

    @property
    def pieces(self) -> int:
        """Number of micro-batches into which the present turn splits a batch."""
        return self.turn.pieces

    @pieces.setter
    def pieces(self, pieces: int) -> None:
        self.turn.pieces = pieces

    def __call__(self, step: Step) -> Done:
        """Make an optimizer step, with all Parts."""
        self.turn = step.turn
        return self.chain.run(step)

    def make(self, step: Step) -> Done:
        """Make an optimizer step without the Parts around it."""
        self.turn = step.turn
        self.update.begin()
        computed = self._gradients(step)
        for act in self.chain.before_update:
            act(step)
        return self.finish(computed, step.number)

    def _at_rates_of(self, number: int) -> AbstractContextManager[None]:
        if self.lr_scale is None or not self.lr_scale.changes:
            return _NO_OTHERS
        return scaled(self.turn.optimizers, self.lr_scale.at(number - 1))

    def finish(self, computed: _Computed, number: int) -> Done:
        """Let the optimizers step; after this the step cannot be tried again."""
        start = clock()
        with self._at_rates_of(number):
            self._update()
        self.stopping = self.strategy.after_step() or self.stopping
        self.mark("optimizer")
        return Done(*computed, clock() - start)

    def mark(self, lane: str) -> None:
        """Assign the device's work since the previous mark to this lane."""
        if self.lanes is not None:
            self.lanes.mark(lane)

    def _update(self) -> None:
        if self.scaler is None:
            self.update()
        else:
            self.update.scaled(self.scaler)

    def _gradients(self, step: Step) -> _Computed:
        strategy, log = self.strategy, self.world.collectives
        log.step, before = step.number, log.waited
        strategy.before_step(self.turn.number, self.update.parameters)
        with self._all_together():
            own = self._own_loss(step)
            assert own.total is not None
            if own.is_mean:
                return own.total, own.weight, own.forward, own.backward, 0
            start, waited = clock(), log.waited
            for act in self.chain.before_sum:
                act(step)
            sums = strategy.finish()
            if self.own_buffers is not None:
                self.own_buffers.after_step(float(sum(batch.samples for batch in step.batches)))
            self.mark("sync")
            self.stopping = bool(sums.votes)
            waited = log.waited - waited
            self._divide(self._samples_of(step.batches), sums.weight)
            assert torch.is_tensor(sums.total)
            loss = (sums.total / not_zero(sums.weight, sums.total.dtype)).to(own.total.dtype)
            backward = own.backward + clock() - start - waited
        return loss, sums.weight, own.forward, backward, log.waited - before

    def _own_loss(self, step: Step) -> _OwnLoss:
        compute, batches, forward = step.compute, step.batches, self.chain.forward(step.compute)
        weights: torch.Tensor | None = None
        while True:
            pieces = self._pieces_of(batches)
            # If a single rank has a single micro-batch, that is the whole step, and its loss is the
            # mean already.
            samples = None if self.is_alone and len(pieces) == 1 else self._samples_of(batches)
            moving = None if samples is None else self._moving()
            try:
                if samples is None and not self.strategy.takes_whole_batches:
                    return self._only_pass(forward, pieces[0])
                if samples is None or not isinstance(compute, Weighing):
                    return self._passes(compute, forward, pieces, samples)
                if weights is None:
                    weights = compute.sums_of_weights(batches)
                    if not self.strategy.steps_apart:
                        self.world.sum(weights, "weights of several losses")
                with compute.of_step(weights):
                    return self._passes(compute, forward, pieces, samples)
            except (RuntimeError, MemoryError) as error:
                self.strategy.disarm()
                if not self.may_split:
                    raise
                self._shrink(error, batches, step.number)
                if moving is not None:
                    moving.put_back()

    def _pieces_of(self, batches: Sequence[Batch]) -> list[Batch]:
        if self.strategy.takes_whole_batches:
            return placed(batches)
        if len(batches) == 1 and self.pieces == 1 and not isinstance(self.micro_batch, int):
            return [batches[0]]
        return [
            piece
            for batch in placed(batches)
            for piece in batch.split(self.pieces_on_all_ranks(batch))
        ]

    def _samples_of(self, batches: Sequence[Batch]) -> float:
        return self.samples or float(sum([batch.size for batch in batches]))

    def _moving(self) -> Moving | None:
        if self._moves is None:
            model = self.switch.model
            is_retried = (
                self.micro_batch == "auto"
                and not is_batch_coupled(model)
                and not self.strategy.meets_in_compute
            )
            # On several ranks each step seeds the generator, so its state is not restored.
            self._moves = Moving(model, draws=self.is_alone) if is_retried else False
        if not self._moves:
            return None
        self._moves.keep()
        return self._moves

    def _only_pass(self, forward: Compute, batch: Batch) -> _OwnLoss:
        start = clock()
        mean, weight = mean_of_value(self._forward(forward, batch), batch.size)
        middle = clock()
        self.mark("forward")
        self._backward(mean)
        self.mark("backward")
        return _OwnLoss(True, mean.detach(), weight, middle - start, clock() - middle)

    def _passes(
        self, compute: Compute, forward: Compute, pieces: Sequence[Batch], samples: float | None
    ) -> _OwnLoss:
        strategy, log = self.strategy, self.world.collectives
        part = _OwnLoss(is_mean=samples is None)

        def loss(piece: Batch) -> torch.Tensor:
            value = self._forward(forward, piece)
            if samples is None:
                mean, weight = mean_of_value(value, piece.size)
                part.add(mean.detach(), weight)
                return mean
            total, weight = sum_of_value(value, piece.size)
            # If several ranks compute the same sample, it counts once. Of pipeline stages, one
            # computes the loss.
            copies = 1 if strategy.takes_whole_batches else piece.copies
            part.add(total.detach() / copies, weight / copies)
            return total / (samples * copies)

        def arm() -> None:
            if part.total is None:  # a pipeline stage that has no loss
                part.total = torch.zeros(())
            if samples is not None:
                own = Sums(part.total, part.weight, float(self.wants_to_stop))
                strategy.arm(own, samples, self.scaler)

        if strategy.takes_whole_batches:
            times = [strategy.pass_on(compute, piece, loss) for piece in pieces]
            part.forward, part.backward = map(sum, zip(*times, strict=True))
            arm()
            return part
        for number, piece in enumerate(pieces, 1):
            start, begun = clock(), log.waited
            value = loss(piece)
            middle, waited = clock(), log.waited
            self.mark("forward")
            if number == len(pieces):
                arm()
            self._backward(value)
            self.mark("backward")
            part.forward += middle - start - (waited - begun)
            part.backward += clock() - middle - (log.waited - waited)
        return part

    def _forward(self, forward: Compute, piece: Batch) -> Value:
        if self._norms is not None:
            self._norms.copies = piece.copies
            self._norms.is_filling = not piece.samples
        if self._in_context:
            with self.switch.autocast():
                value = forward(piece)
        else:  # entering a context without effect would take time, too
            torch.clear_autocast_cache()
            value = forward(piece)
        if not piece.samples and not isinstance(value, tuple):
            return value * 0.0, 0.0  # all rows are padding
        return value

    def _backward(self, loss: torch.Tensor) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        try:
            scaled.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            explain_backward(error, self.update.parameters)
            raise

    def pieces_on_all_ranks(self, batch: Batch) -> int:
        """Return the number of micro-batches, equal on all ranks if the step has collectives."""
        wanted = self.wanted_pieces(batch)
        may_differ = isinstance(self.micro_batch, int) or wanted > 1
        if not may_differ or not self._meets_in_compute:
            return wanted
        table = torch.zeros(2, self.world.size, dtype=torch.int64)
        table[:, self.world.rank] = torch.tensor([wanted, batch.size])
        self.world.sum(table, "number of micro-batches")
        # This limit gives each micro-batch of each rank at least one sample.
        return min(int(table[0].max()), int(table[1].min()))

    def wanted_pieces(self, batch: Batch) -> int:
        """Return the number of micro-batches into which this rank alone would split a batch."""
        if batch.is_jagged:
            check_not_jagged(batch, pieces_for(batch.size, self.micro_batch), self.micro_batch)
            return 1
        return pieces_for(batch.size, self.micro_batch) * self.pieces

    def _all_together(self) -> AbstractContextManager[None]:
        # Before ranks step together, each rank tries settings alone.
        return _NO_OTHERS if self.is_alone else self._of_all_ranks()

    @contextmanager
    def _of_all_ranks(self) -> Iterator[None]:
        norms = _NO_OTHERS if self._norms is None else self._norms.together()
        with rank_rng(self.world), norms:
            yield

    def meet(self, world: World) -> None:
        """Let BatchNorm layers use the whole batch's statistics once ranks step together."""
        self._norms = SyncBatchNorm(self.switch.model, world)

    def train_with(self, world: World, samples: float, strategy: Strategy) -> None:
        """Make steps together with all ranks from now on."""
        self.world, self.samples = world, max(1.0, samples)
        self._moves = None
        self.strategy = strategy

    def begin(self) -> None:
        """Let the strategy shard the model, once all checks before the first step are done."""
        self.strategy.begin()
        self.turns.sum_across(self.strategy.across)

    def meet_others(self) -> None:
        """Synchronize ranks that step alone or hold parts of tables; all ranks call it."""
        self.switch.gather_rows()
        if not self.strategy.steps_apart:
            return
        self.switch.settle_rows()
        self.stopping = self.strategy.meet() or self.stopping
        for turn in self.turns:
            turn.mean_loss.share(self.world)

    @property
    def _meets_in_compute(self) -> bool:
        has_norms = self._norms is not None and self._norms.has_layers
        is_sharded = self.switch.shards is not None
        if is_sharded or self.strategy.meets_in_compute:
            return True
        return has_norms or adapter_of(self.switch.model).meets_in_loss

    @property
    def together(self) -> World:
        """The ranks that run the same code now: all ranks within a step, else this rank alone."""
        return ONE if self._norms is None else self._norms.world

    def close(self, error: BaseException | None = None) -> None:
        """Remove hooks and other additions from the model's parameters."""
        self.strategy.close(error)
        if self._norms is not None:
            self._norms.close()
            self._norms = None

    def _divide(self, samples: float, weight: torch.Tensor | float) -> None:
        # The value is checked only where reading it costs nothing. On other devices the division is
        # cheaper than waiting for the value.
        is_known = not torch.is_tensor(weight) or weight.device.type == "cpu"
        if is_known and float(weight) == samples:
            return
        # In float64, so that a float64 model keeps its digits.
        factor = samples / not_zero(weight, torch.float64)
        gradients = [p.grad for p in self.update.parameters if p.grad is not None]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, own in by_device.items():
            torch._foreach_mul_(own, factor.to(device) if torch.is_tensor(factor) else factor)

    def forward_alone(self) -> AbstractContextManager[Any]:
        """Return the context of a forward without backward: no_grad, unless the loss needs grad."""
        return nullcontext() if self.takes_gradients else torch.no_grad()

    def look(self, batch: Batch, at: Callable[[list[Batch]], _T]) -> _T:
        """Call `at` with each micro-batch in which a step would run the batch, before any step.

        If memory runs out, the micro-batches become smaller, for later steps too.
        """
        while True:
            try:
                return at(batch.split(self.wanted_pieces(batch)))
            except (RuntimeError, MemoryError) as error:
                self._shrink(error, (batch,), 0)

    def _shrink(self, error: Exception, batches: Sequence[Batch], step: int) -> None:
        if not is_out_of_memory(error):
            raise error
        forget_frames(error)
        self.update.forget()
        if self.switch.device.type == "cuda":
            is_freed = sum(free() for free in self.frees_memory)
            torch.cuda.empty_cache()
            if is_freed:
                return
        largest = max(batch.size for batch in batches)
        # Before the first step ranks do not compute together yet, but the message names the rank.
        world = self.world if self._norms is None else self._norms.ranks
        on_rank = f" on rank {world.rank}" if world.size > 1 else ""
        when = f"step {step}" if step else "before the first step"
        if any(batch.is_jagged for batch in batches):
            raise jagged_out_of_memory(largest, when, on_rank) from error
        if self.micro_batch != "auto":
            raise not_split(self.micro_batch, largest, when, on_rank) from error
        if on_rank and (what := self._meets_others_by(step)):
            staged = self.strategy.takes_whole_batches
            raise not_split_alone(what, largest, when, on_rank, staged=staged) from error
        self.pieces = smaller(self.switch.model, self.pieces, largest, when, on_rank)
        whose = "its part" if on_rank else "the batch"
        self.notes.append(
            f"{when}: memory ran out{on_rank}; {whose} now runs in {self.pieces} micro-batches"
        )

    def _meets_others_by(self, step: int) -> str:
        if self.strategy.takes_whole_batches:
            return "micro-batches of a stage"
        if step > 0 and self.switch.shards is not None:
            return "lookups in sharded tables"
        if self.strategy.meets_in_compute:
            return "weights that are gathered"
        return "Keras' losses" if adapter_of(self.switch.model).meets_in_loss else ""


def placed(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches of one step, each with its offset among the step's samples."""
    result: list[Batch] = []
    before = 0
    for batch in batches:
        result.append(batch._replace(start=before + batch.start) if before else batch)
        before += batch.whole or batch.size
    return result
