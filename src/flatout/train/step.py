"""One optimizer step.

    begin        gradients that others left are forgotten         (optim/update.py)
    forward      compute(batch) under autocast, a mean or (sum, weight)
    backward     of the loss; of each micro-batch where the batch is split
    sums         of gradients and losses over all ranks              (strategies/)
    update       clip, check, optimizer, gradients to None        (optim/update.py)

A batch that does not fit in memory is taken again in smaller pieces. Where a job has several
optimizers, a step is that of one of them or of several together: its turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns as clock
from typing import NamedTuple, TypeVar

import torch

from flatout.data.batch import Batch, split
from flatout.errors import DataError, FlatoutError, OutOfMemory
from flatout.models import is_batch_coupled
from flatout.models.keras_model import is_keras
from flatout.models.sample_dropout import SampleDropout
from flatout.optim import LrScale, Optimizers, Update, as_tuple
from flatout.optim.rates import scaled
from flatout.strategies import Ddp, Sums, SyncBatchNorm, rank_rng, sparse_weights
from flatout.strategies.reductions import Beside, Reduction
from flatout.train.losses import Value
from flatout.train.micro_batch import forget_frames, is_out_of_memory, pieces_for, smaller
from flatout.train.settings import Settings, Switch
from flatout.train.snapshot import Moving, untouched
from flatout.train.turn import Turn
from flatout.world import ONE, World

Compute = Callable[[Batch], Value]
# Mean loss, its weight, and the times of forward, backward and sync in ns; the gradients are in
# place.
_Found = tuple[torch.Tensor, torch.Tensor | float, int, int, int]
_T = TypeVar("_T")
# Divides what is zero; any smaller and 1 / _TINY would not be finite in float32.
_TINY = 1e-12


class Weighing(ABC):
    """A `Compute` of several losses, each of which divides by a weight of its own."""

    @abstractmethod
    def sums_of_weights(self, batches: Sequence[Batch]) -> torch.Tensor:
        """What is to be added up over all ranks before the first part of a step."""

    @abstractmethod
    def of_step(self, sums: torch.Tensor) -> AbstractContextManager[None]:
        """Within, batches are parts of a step of which these are the sums."""


class Done(NamedTuple):
    """What one optimizer step leaves: mean loss, the weight of that mean, and times in ns."""

    loss: torch.Tensor
    weight: torch.Tensor | float
    forward: int
    backward: int
    sync: int
    optimizer: int


class Stepper:
    """Runs optimizer steps on a model under the Settings of a Switch.

    Args:
        switch: holds model, optimizers and device.
        clip_norm: largest total gradient norm, or None.
        clip_value: largest absolute gradient element, or None.
        micro_batch: "auto" (split only when memory runs out), "whole", or samples per micro-batch.
        dropout: keys dropout by sample, where that was asked for.
        world: the ranks that train together, each on its part of the batch.

    Attributes:
        wants_to_stop: whether this rank asks all to stop after the next step.
        stopping: whether any rank has asked so; the same on all ranks.
        lr_scale: what the user's learning-rate rule does, or None.
        samples: about how many samples of all ranks make a step: only a scale, the same on all.
        joint: the turn of all optimizers together.
        turn: that of the present step, or the latest.
        turns: all that there were, by the places of their optimizers.
    """

    def __init__(
        self,
        switch: Switch,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        micro_batch: str | int = "whole",
        dropout: SampleDropout | None = None,
        world: World = ONE,
    ) -> None:
        self.switch = switch
        self.dropout = dropout
        self.world = world
        self.wants_to_stop = self.stopping = False
        self.lr_scale: LrScale | None = None
        self.samples = 1.0
        self.reduction: Beside | None = None
        self._norms: SyncBatchNorm | None = None
        self._moving: Moving | None = None
        self._clip = (clip_norm, clip_value)
        # One step with bad numbers holds back the steps of all optimizers.
        self._flags: dict[torch.device, torch.Tensor] = {}
        self.turns: dict[tuple[int, ...], Turn] = {}
        self.joint = self.turn = self.turn_at(tuple(range(len(switch.optimizers))))
        self.micro_batch = micro_batch
        self.notes: list[str] = []
        self._use_autocast = False

    def use(self, settings: Settings) -> None:
        """Switch to other settings before the next step."""
        self.switch.use(settings)
        self._use_autocast = settings.precision != "fp32"
        for turn in self.turns.values():
            turn.update.refresh()
            if settings.precision != "fp16":
                turn.scaler = None
            elif turn.scaler is None:
                turn.scaler = self._new_scaler()

    def turn_of(self, optimizers: Optimizers) -> Turn:
        """The turn of some of the job's optimizers.

        Raises:
            FlatoutError: one of them is not among them.
        """
        known = {id(optimizer): place for place, optimizer in enumerate(self.switch.optimizers)}
        asked = as_tuple(optimizers)
        strangers = [type(o).__name__ for o in asked if id(o) not in known]
        if strangers or not asked:
            raise FlatoutError(
                f"a step of {strangers[0]}, which is not among the {len(known)} optimizers that "
                "prepare was given"
                if strangers
                else "a step of no optimizer",
                do="give prepare a list of all of them, and step the same objects",
            )
        return self.turn_at(tuple(sorted({known[id(optimizer)] for optimizer in asked})))

    def turn_at(self, places: tuple[int, ...]) -> Turn:
        """The turn of the optimizers at these places of the job's."""
        found = self.turns.get(places)
        if found is None:
            update = Update(
                [self.switch.optimizers[place] for place in places],
                clip_norm=self._clip[0],
                clip_value=self._clip[1],
                flags=self._flags,
            )
            scaler = self._new_scaler() if self.switch.now.precision == "fp16" else None
            pieces = self.joint.pieces if self.turns else 1
            found = self.turns[places] = Turn(places, update, scaler, pieces)
        return found

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.switch.device.type)

    @property
    def update(self) -> Update:
        """Applies the gradients of the present turn."""
        return self.turn.update

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of the present turn where fp16 needs one."""
        return self.turn.scaler

    @property
    def pieces(self) -> int:
        """Into how many micro-batches the present turn splits a batch."""
        return self.turn.pieces

    @pieces.setter
    def pieces(self, pieces: int) -> None:
        self.turn.pieces = pieces

    def __call__(
        self, compute: Compute, batches: Sequence[Batch], step: int, turn: Turn | None = None
    ) -> Done:
        """One optimizer step on `batches` (more than one when gradients are accumulated).

        Args:
            compute: forward and loss of one (micro-)batch.
            batches: on the device already.
            step: number of the step, from 1; also for what is drawn.
            turn: which optimizers step; None for all together.

        Raises:
            OutOfMemory: where the batch cannot be split further, or only by changing learning.
        """
        self.turn = turn or self.joint
        self.turn.update.begin()
        if self.dropout is None:
            found = self._gradients(compute, batches, step)
        else:
            with self.dropout.step(step):
                found = self._gradients(compute, batches, step)
        start = clock()
        # Here weights change: an error is no longer a reason to take the step again.
        if self.lr_scale is None:
            self.turn.apply()
        else:
            with scaled(self.turn.optimizers, self.lr_scale.at(step - 1)):
                self.turn.apply()
        return Done(*found, clock() - start)

    def _gradients(self, compute: Compute, batches: Sequence[Batch], step: int) -> _Found:
        if self.world.size > 1:
            self.world.collectives.step = step
            with self._all_together(), self._weighed(compute, batches):
                return self._with_others(compute, batches, step)
        if len(batches) == 1 and self.pieces == 1 and not isinstance(self.micro_batch, int):
            try:
                return self._whole(compute, batches[0])
            except (RuntimeError, MemoryError) as error:
                self._shrink(error, batches, step)
        with self._weighed(compute, batches):
            return self._in_pieces_that_fit(compute, batches, step)

    @contextmanager
    def _weighed(self, compute: Compute, batches: Sequence[Batch]) -> Iterator[None]:
        """Within, losses that each divide by a weight of their own know that of the whole step."""
        if not isinstance(compute, Weighing):
            yield
            return
        sums = compute.sums_of_weights(batches)
        self.world.sum(sums, "weights of several losses")
        with compute.of_step(sums):
            yield

    def _whole(self, compute: Compute, batch: Batch) -> _Found:
        """The common case: one batch, one piece."""
        if self.dropout is not None:
            self.dropout.at(batch.start, batch.size)
        start = clock()
        if self._use_autocast:
            with self.switch.autocast():
                value = compute(batch)
        else:
            value = compute(batch)
        loss, weight = _mean(value, batch.size)
        middle = clock()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), weight, middle - start, clock() - middle, 0

    def _with_others(self, compute: Compute, batches: Sequence[Batch], step: int) -> _Found:
        """This rank's part of the batch, in smaller pieces where memory runs out, then all sums."""
        ddp = self._strategy()
        before = self.world.collectives.waited
        while True:
            if self._moving is not None:
                self._moving.keep()
            try:
                total, forward, backward = self._own_part(compute, batches, ddp)
                break
            except (RuntimeError, MemoryError) as error:
                ddp.disarm()
                self._shrink(error, batches, step)
                if self._moving is not None:
                    self._moving.put_back()
        start = clock()
        if self.switch.device.type == "cuda":
            # So that what is waited for from here on is other ranks, and not this one's backward.
            torch.cuda.current_stream(self.switch.device).synchronize()
        waited = self.world.collectives.waited
        sums = ddp.finish()
        self.stopping = bool(sums.votes)
        waited = self.world.collectives.waited - waited
        self._divide(self.samples, sums.weight)
        assert torch.is_tensor(total)
        assert torch.is_tensor(sums.total)
        loss = (sums.total / _not_zero(sums.weight, sums.total.dtype)).to(total.dtype)
        backward += clock() - start - waited
        return loss, sums.weight, forward, backward, self.world.collectives.waited - before

    def _own_part(
        self, compute: Compute, batches: Sequence[Batch], ddp: Ddp
    ) -> tuple[torch.Tensor | float, int, int]:
        """The sum of losses, and times of forward and backward without waiting.

        Only the last piece's backward tells its gradients to other ranks.
        """
        assert self._norms is not None
        if self.dropout is not None and not all(batch.whole for batch in batches):
            raise DataError(
                "dropout by sample wants to know where in the batch of all ranks these samples are",
                do="let Flatout hand out each rank's part of a batch (no shard by files or rows); "
                "give a Batch of your own its `start` and `whole`",
            )
        pieces = [
            piece
            for batch in placed(batches)
            for piece in split(batch, self._pieces_on_all_ranks(batch))
        ]
        log = self.world.collectives
        total: torch.Tensor | float = 0.0
        weight: torch.Tensor | float = 0.0
        forward = backward = 0
        for number, piece in enumerate(pieces):
            self._norms.copies = piece.copies
            if self.dropout is not None:
                self.dropout.at(piece.start, piece.size)
            start, begun = clock(), log.waited
            with self.switch.autocast():
                part, part_weight = _sum(compute(piece), piece.size)
            # What several ranks have computed counts once.
            scaled = part / (self.samples * piece.copies)
            total = total + part.detach() / piece.copies
            weight = weight + part_weight / piece.copies
            middle, waited = clock(), log.waited
            if self.scaler is not None:
                scaled = self.scaler.scale(scaled)
            if number + 1 == len(pieces):
                vote = float(self.wants_to_stop)
                ddp.arm(Sums(total, weight, vote), self.samples, self.scaler)
            scaled.backward()  # type: ignore[no-untyped-call]
            forward += middle - start - (waited - begun)
            backward += clock() - middle - (log.waited - waited)
        return total, forward, backward

    def _pieces_on_all_ranks(self, batch: Batch) -> int:
        """Into how many: equally many on each where what they compute has collectives in it."""
        wanted = pieces_for(batch.size, self.micro_batch) * self.pieces
        if not self._meets_in_compute or not isinstance(self.micro_batch, int):
            return wanted
        table = torch.zeros(2, self.world.size, dtype=torch.int64)
        table[:, self.world.rank] = torch.tensor([wanted, batch.size])
        self.world.sum(table, "number of micro-batches")
        # No rank has fewer samples than pieces.
        return min(int(table[0].max()), int(table[1].min()))

    @contextmanager
    def _all_together(self) -> Iterator[None]:
        """Within, all ranks run the same forward and backward, and draw each their own numbers."""
        assert self._norms is not None
        with rank_rng(self.world), self._norms.together():
            yield

    def meet(self, world: World) -> None:
        """Let BatchNorm layers take any part of a batch, before steps are those of all ranks."""
        self._norms = SyncBatchNorm(self.switch.model, world)

    def train_with(self, world: World, samples: float, reduction: Reduction) -> None:
        """From now on each step is one of all ranks.

        Args:
            world: of this rank.
            samples: about how many samples of all ranks make a step: only a scale.
            reduction: how gradients are added up.
        """
        self.world, self.samples = world, max(1.0, samples)
        self.reduction = Beside(reduction, self.switch.device)
        # Where an attempt may be taken again, what the model's forward changes is put back before.
        self._moving = None
        if self.micro_batch == "auto" and not is_batch_coupled(self.switch.model):
            self._moving = Moving(self.switch.model)

    @property
    def _meets_in_compute(self) -> bool:
        """Whether ranks wait for each other within forward: for BatchNorm, or losses of Keras."""
        return (self._norms is not None and self._norms.has_layers) or is_keras(self.switch.model)

    @property
    def together(self) -> World:
        """The ranks that run the same code right now: all within a step, else this one alone."""
        return ONE if self._norms is None else self._norms.world

    def _strategy(self) -> Ddp:
        turn = self.turn
        if turn.ddp is None or not turn.ddp.is_of(turn.update.parameters):
            if turn.ddp is not None:
                turn.ddp.close()
            assert self.reduction is not None
            turn.ddp = Ddp(
                self.world,
                turn.update.parameters,
                self.reduction,
                sparse=sparse_weights(self.switch.model),
                turn=turn.number,
            )
        return turn.ddp

    def close(self) -> None:
        """Take off what was put on the model's parameters."""
        for turn in self.turns.values():
            if turn.ddp is not None:
                turn.ddp.close()
                turn.ddp = None
        if self.reduction is not None:
            self.reduction.close()
        if self._norms is not None:
            self._norms.close()
            self._norms = None

    def _in_pieces_that_fit(self, compute: Compute, batches: Sequence[Batch], step: int) -> _Found:
        if self.micro_batch != "auto":
            try:
                return self._in_pieces(compute, batches)
            except (RuntimeError, MemoryError) as error:
                self._shrink(error, batches, step)
        while True:
            try:
                with untouched(self.switch.model, only_on_error=True):
                    return self._in_pieces(compute, batches)
            except (RuntimeError, MemoryError) as error:
                self._shrink(error, batches, step)

    def _in_pieces(self, compute: Compute, batches: Sequence[Batch]) -> _Found:
        """Sums of the pieces' losses and gradients, divided once at the end by the whole weight."""
        samples = float(sum(batch.size for batch in batches))
        total: torch.Tensor | float = 0.0
        weight: torch.Tensor | float = 0.0
        forward = backward = 0
        for batch in placed(batches):
            pieces = pieces_for(batch.size, self.micro_batch) * self.pieces
            for piece in split(batch, pieces):
                if self.dropout is not None:
                    self.dropout.at(piece.start, piece.size)
                start = clock()
                with self.switch.autocast():
                    part, part_weight = _sum(compute(piece), piece.size)
                # Divided by the sample count already, so that fp16's loss scale keeps its range.
                scaled = part / samples
                middle = clock()
                if self.scaler is not None:
                    scaled = self.scaler.scale(scaled)
                scaled.backward()  # type: ignore[no-untyped-call]
                total = total + part.detach()
                weight = weight + part_weight
                forward += middle - start
                backward += clock() - middle
        start = clock()
        self._divide(samples, weight)
        assert torch.is_tensor(total)
        loss = total / _not_zero(weight, total.dtype)
        return loss, weight, forward, backward + clock() - start, 0

    def _divide(self, samples: float, weight: torch.Tensor | float) -> None:
        """Gradients were divided by the sample count; make that the loss's own weight."""
        # Where reading costs nothing. Elsewhere a pass over the gradients is cheaper than waiting.
        is_known = not torch.is_tensor(weight) or weight.device.type == "cpu"
        if is_known and float(weight) == samples:
            return
        # In float64, so that a float64 model keeps its digits.
        factor = samples / _not_zero(weight, torch.float64)
        gradients = [p.grad for p in self.update.parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def look(self, batch: Batch, at: Callable[[list[Batch]], _T]) -> _T:
        """What `at` gives for the pieces in which a step would run the batch, before any step.

        Where memory runs out they become smaller, for the steps too.

        Raises:
            OutOfMemory: as of a step.
        """
        while True:
            try:
                return at(split(batch, pieces_for(batch.size, self.micro_batch) * self.pieces))
            except (RuntimeError, MemoryError) as error:
                self._shrink(error, (batch,), 0)

    def _shrink(self, error: Exception, batches: Sequence[Batch], step: int) -> None:
        """After running out of memory: forget the attempt and split finer."""
        if not is_out_of_memory(error):
            raise error
        forget_frames(error)
        self.update.forget()
        if self.switch.device.type == "cuda":
            torch.cuda.empty_cache()
        largest = max(batch.size for batch in batches)
        # Before the first step the ranks do not compute together, but those of them will.
        world = self.world if self._norms is None else self._norms.ranks
        on_rank = f" on rank {world.rank}" if world.size > 1 else ""
        when = f"step {step}" if step else "before the first step"
        if self.micro_batch != "auto":
            raise OutOfMemory(
                f"memory ran out{on_rank}",
                where=f"{when}, batch of {largest}, micro_batch={self.micro_batch!r}",
                do="set Memory(micro_batch='auto'), which splits the batch until it fits, or "
                "Memory(activation_checkpointing='on')",
            ) from error
        if on_rank and is_keras(self.switch.model):
            raise OutOfMemory(
                f"memory ran out{on_rank}, and Keras' losses may meet other ranks' within a "
                "step, so that none can take its part again",
                where=f"{when}, batch of {largest}",
                do=f"set Memory(micro_batch={max(1, largest // 2)}), lower batch_size, or use "
                "Memory(activation_checkpointing='on')",
            ) from error
        self.pieces = smaller(self.switch.model, self.pieces, largest, when, on_rank)
        whose = "its part" if on_rank else "the batch"
        self.notes.append(
            f"{when}: memory ran out{on_rank}; {whose} now runs in {self.pieces} micro-batches"
        )


def placed(batches: Sequence[Batch]) -> list[Batch]:
    """The batches of one step, each with its place among the samples of the whole step."""
    found: list[Batch] = []
    before = 0
    for batch in batches:
        found.append(batch._replace(start=before + batch.start) if before else batch)
        before += batch.whole or batch.size
    return found


def _mean(value: Value, size: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """A loss as (mean, weight)."""
    if not isinstance(value, tuple):
        return value, size
    total, weight = value
    if torch.is_tensor(weight):
        weight = weight.detach()
    return total / _not_zero(weight, total.dtype), weight


def _sum(value: Value, size: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """A loss as (sum, weight)."""
    if isinstance(value, tuple):
        total, weight = value
        return total, weight.detach() if torch.is_tensor(weight) else weight
    return value * size, size


def _not_zero(weight: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor | float:
    """The weight to divide by: nothing counted means no loss and no gradient, not 0/0."""
    return weight.to(dtype).clamp_min(_TINY) if torch.is_tensor(weight) else max(weight, _TINY)
