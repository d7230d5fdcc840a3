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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import perf_counter_ns as clock
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch

from flatout.data import Batch, features_give_way, tensors_in
from flatout.errors import DataError, FlatoutError, OutOfMemory
from flatout.measure import DeviceLanes
from flatout.models import SampleDropout, adapter_of, is_batch_coupled
from flatout.optim import LrScale, Optimizers, Update, as_tuple, scaled
from flatout.strategies import Strategy, Sums, SyncBatchNorm
from flatout.strategies.rank_rng import rank_rng
from flatout.train.losses import Value
from flatout.train.micro_batch import forget_frames, is_out_of_memory, pieces_for, smaller
from flatout.train.settings import Settings, Switch
from flatout.train.snapshot import Moving
from flatout.train.turn import Turn
from flatout.world import ONE, World

Compute = Callable[[Batch], Value]
# Mean loss, its weight, and the times of forward, backward and sync in ns; the gradients are in
# place.
_Found = tuple[torch.Tensor, torch.Tensor | float, int, int, int]
_T = TypeVar("_T")
# Divides what is zero; any smaller and 1 / _TINY would not be finite in float32.
_TINY = 1e-12
_NO_OTHERS = nullcontext()


class Weighing(ABC):
    """A `Compute` of several losses, each of which divides by its own weight."""

    @abstractmethod
    def sums_of_weights(self, batches: Sequence[Batch]) -> torch.Tensor:
        """What is to be added up over all ranks before the first part of a step."""

    @abstractmethod
    def of_step(self, sums: torch.Tensor) -> AbstractContextManager[None]:
        """Within, batches are parts of a step of which these are the sums."""


class _Part(NamedTuple):
    """What this rank's forward and backward passes leave of a step."""

    total: torch.Tensor
    weight: torch.Tensor | float
    forward: int
    backward: int
    is_mean: bool  # total is the mean of a whole step


class Done(NamedTuple):
    """What one optimizer step leaves: mean loss, the weight of that mean, and times in ns."""

    loss: torch.Tensor
    weight: torch.Tensor | float
    forward: int
    backward: int
    sync: int
    optimizer: int


class MakesCudaGraphs(Protocol):
    """Makes steps as CUDA graphs; cuda_graph.py says what these are."""

    @property
    def why(self) -> str:
        """Why no step is recorded under the present settings; "" while it may be."""

    def __call__(
        self, eager: Callable[[], Done], compute: Any, batches: Sequence[Batch], step: int
    ) -> Done:
        """Make a step, by a graph where there is one."""

    def objection(self, compute: Any, batches: Sequence[Batch]) -> str:
        """Why a step is none that a graph could make; "" where nothing is known."""


class MakesGraphs(Protocol):
    """Makes steps as one compiled graph; capture.py says what these are.

    Attributes:
        is_asked: whether steps are to be captured, not only tried so.
        why: why no step is captured; "" while it may be.
    """

    is_asked: bool
    why: str

    def __call__(
        self, eager: Callable[[], Done], compute: Any, batches: Sequence[Batch], step: int
    ) -> Done:
        """Make a step, by the graph where it can."""

    @property
    def is_used(self) -> bool:
        """Whether the graph is there."""

    @property
    def compiling(self) -> object | None:
        """What compiles, while it does."""

    def give_up(self, why: str) -> None:
        """Make all steps from here on eagerly."""

    def close(self) -> None:
        """End what goes on beside the training."""


class Stepper:
    """Runs optimizer steps on a model under the Settings of a Switch.

    Args:
        switch: holds model, optimizers and device.
        clip_norm: largest total gradient norm, or None.
        clip_value: largest absolute gradient element, or None.
        micro_batch: "auto" (split only when memory runs out), "whole", or samples per micro-batch.
        dropout: keys dropout by sample, where that was asked for.

    Attributes:
        world: the ranks that train together, each on its part of the batch.
        wants_to_stop: whether this rank asks all to stop after the next step.
        stopping: whether any rank has asked so; the same on all ranks.
        lr_scale: what the user's learning-rate rule does, or None.
        strategy: how steps of this rank become steps of all.
        samples: about how many samples of all ranks make a step: only a scale, the same on all;
            0 before steps are those of all ranks.
        may_split: whether a batch is taken again in smaller pieces where memory runs out.
        capture: makes steps as one compiled graph where settings say so; None where none can.
        lanes: puts events between the parts of a step, on a device that runs behind the host.
        cuda_graphs: makes steps as CUDA graphs where settings say so; None where none can.
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
    ) -> None:
        self.switch = switch
        self.dropout = dropout
        self.world = ONE
        self.wants_to_stop = self.stopping = False
        self.lr_scale: LrScale | None = None
        self.samples = 0.0
        self.may_split = True
        self.strategy = Strategy()
        self._norms: SyncBatchNorm | None = None
        # Where an attempt is taken again, what the forward pass has changed is put back before.
        self._moves: Moving | Literal[False] | None = None
        self._clip = (clip_norm, clip_value)
        # One step with bad numbers holds back the steps of all optimizers.
        self._flags: dict[torch.device, torch.Tensor] = {}
        self.turns: dict[tuple[int, ...], Turn] = {}
        self.joint = self.turn = self.turn_at(tuple(range(len(switch.optimizers))))
        self.micro_batch = micro_batch
        self.notes: list[str] = []
        self._use_autocast = False
        self._captures = False
        self.capture: MakesGraphs | None = None
        self.lanes: DeviceLanes | None = None
        self._records = False
        self.cuda_graphs: MakesCudaGraphs | None = None

    def use(self, settings: Settings) -> None:
        """Switch to other settings before the next step."""
        now = self.switch.now
        rows = settings.touched_rows != now.touched_rows
        if rows or settings.memory_format != now.memory_format:
            self.switch.gather_rows()  # ranks switch together
        self.switch.use(settings)
        if rows:
            self.strategy.renew()
        self._use_autocast = settings.precision != "fp32"
        self._captures = settings.capture == "on"
        self._records = settings.cuda_graph == "on"
        self.strategy.micro_batches = settings.micro_batches
        for turn in self.turns.values():
            turn.update.refresh()
            if settings.precision != "fp16":
                turn.scaler = None
            elif turn.scaler is None:
                turn.scaler = self._new_scaler()

    def turn_of(self, optimizers: Optimizers | None) -> Turn:
        """The turn of some of the job's optimizers; None for all together.

        Raises:
            FlatoutError: one of them is not among them.
        """
        if optimizers is None:
            return self.joint
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
                rows=self.switch.rows,
            )
            update.across = self.strategy.across
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
        if self.lanes is not None:
            self.lanes.begin()
        makes = self.capture if self._captures else self.cuda_graphs if self._records else None
        if makes is None or self.turn is not self.joint:
            return self._eager(compute, batches, step)
        return makes(partial(self._eager, compute, batches, step), compute, batches, step)

    def _eager(self, compute: Compute, batches: Sequence[Batch], step: int) -> Done:
        """One operator after another."""
        shards = self.switch.shards
        if shards is None:
            return self._whole(compute, batches, step)
        self.switch.spread_rows()
        is_one = len(batches) == 1 and self.pieces == 1 and not isinstance(self.micro_batch, int)
        inputs = list(tensors_in(batches[0].inputs)) if is_one else None
        with shards.step(inputs, partial(self._at_rates_of, step)):
            return self._whole(compute, batches, step)

    def _at_rates_of(self, step: int) -> AbstractContextManager[None]:
        """Within, optimizers have the learning rates of a step."""
        if self.lr_scale is None:
            return _NO_OTHERS
        return scaled(self.turn.optimizers, self.lr_scale.at(step - 1))

    def _whole(self, compute: Compute, batches: Sequence[Batch], step: int) -> Done:
        """Gradients, and what the optimizers make of them."""
        self.turn.update.begin()
        if self.dropout is None:
            found = self._gradients(compute, batches, step)
        else:
            with self.dropout.step(step):
                found = self._gradients(compute, batches, step)
        return self.finish(found, step)

    def finish(self, found: _Found, step: int) -> Done:
        """Let the optimizers step: weights change, and the step is no longer taken again."""
        start = clock()
        with self._at_rates_of(step):
            self._update()
        self.stopping = self.strategy.after_step() or self.stopping
        self.mark("optimizer")
        return Done(*found, clock() - start)

    def mark(self, lane: str) -> None:
        """What the device has been asked since the mark before is of this lane."""
        if self.lanes is not None:
            self.lanes.mark(lane)

    def _update(self) -> None:
        if self.scaler is None:
            self.update()
        else:
            self.update.scaled(self.scaler)

    def _gradients(self, compute: Compute, batches: Sequence[Batch], step: int) -> _Found:
        """Those of the mean loss over the batches of all ranks."""
        if self.dropout is not None:
            self._check_places(batches)
        strategy, log = self.strategy, self.world.collectives
        log.step, before = step, log.waited
        strategy.before_step(self.turn.number, self.update.parameters)
        with self._all_together():
            own = self._own_part(compute, batches, step)
            if own.is_mean:
                return own.total, own.weight, own.forward, own.backward, 0
            start, waited = clock(), log.waited
            for rows in self.switch.rows.values():
                rows.merge()
            sums = strategy.finish()
            self.mark("sync")
            self.stopping = bool(sums.votes)
            waited = log.waited - waited
            self._divide(self._samples_of(batches), sums.weight)
            assert torch.is_tensor(sums.total)
            loss = (sums.total / _not_zero(sums.weight, sums.total.dtype)).to(own.total.dtype)
            backward = own.backward + clock() - start - waited
        return loss, sums.weight, own.forward, backward, log.waited - before

    def _own_part(self, compute: Compute, batches: Sequence[Batch], step: int) -> _Part:
        """This rank's part, in smaller pieces where memory runs out."""
        weights: torch.Tensor | None = None
        while True:
            pieces = self._pieces_of(batches)
            is_alone = self.world.size == 1 and not self.strategy.steps_apart
            is_mean = is_alone and len(pieces) == 1
            moving = None if is_mean else self._moving()
            try:
                if is_mean:
                    return self._mean(compute, pieces[0])
                samples = self._samples_of(batches)
                run = self._staged if self.strategy.takes_whole_batches else self._sums
                if not isinstance(compute, Weighing):
                    return run(compute, pieces, samples)
                if weights is None:
                    weights = compute.sums_of_weights(batches)
                    if not self.strategy.steps_apart:
                        self.world.sum(weights, "weights of several losses")
                with compute.of_step(weights):
                    return run(compute, pieces, samples)
            except (RuntimeError, MemoryError) as error:
                self.strategy.disarm()
                if not self.may_split:
                    raise
                self._shrink(error, batches, step)
                if moving is not None:
                    moving.put_back()

    def _pieces_of(self, batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches of this rank's part of a step."""
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
        """What losses are divided by before backward, so that fp16's loss scale keeps its range."""
        return self.samples or float(sum([batch.size for batch in batches]))

    def _moving(self) -> Moving | None:
        """What is put back where an attempt fails and may be taken again."""
        if self._moves is None:
            model = self.switch.model
            is_retried = (
                self.micro_batch == "auto"
                and not is_batch_coupled(model)
                and not self.strategy.meets_in_compute
            )
            # Of several ranks each draws from a generator that a step begins.
            self._moves = Moving(model, draws=self.world.size == 1) if is_retried else False
        if not self._moves:
            return None
        self._moves.keep()
        return self._moves

    def _mean(self, compute: Compute, batch: Batch) -> _Part:
        """The common case: one rank and one piece."""
        start = clock()
        loss, weight = mean_of_value(self._forward(compute, batch), batch.size)
        middle = clock()
        self.mark("forward")
        self._backward(loss)
        self.mark("backward")
        return _Part(loss.detach(), weight, middle - start, clock() - middle, True)

    def _sums(self, compute: Compute, pieces: Sequence[Batch], samples: float) -> _Part:
        """The sum of losses, and times without waiting.

        Only the last piece's backward completes the gradients.
        """
        log = self.world.collectives
        total: torch.Tensor | float = 0.0
        weight: torch.Tensor | float = 0.0
        forward = backward = 0
        for number, piece in enumerate(pieces, 1):
            start, begun = clock(), log.waited
            part, part_weight = _sum(self._forward(compute, piece), piece.size)
            # What several ranks have computed counts once.
            total = total + part.detach() / piece.copies
            weight = weight + part_weight / piece.copies
            middle, waited = clock(), log.waited
            self.mark("forward")
            if number == len(pieces):
                vote = float(self.wants_to_stop)
                self.strategy.arm(Sums(total, weight, vote), samples, self.scaler)
            self._backward(part / (samples * piece.copies))
            self.mark("backward")
            forward += middle - start - (waited - begun)
            backward += clock() - middle - (log.waited - waited)
        assert torch.is_tensor(total)
        return _Part(total, weight, forward, backward, False)

    def _staged(self, compute: Compute, batches: Sequence[Batch], samples: float) -> _Part:
        """The same where each rank has some of the layers: the last one sees losses."""
        total = torch.zeros(())
        weight: torch.Tensor | float = 0.0

        def loss(piece: Batch) -> torch.Tensor:
            nonlocal total, weight
            part, part_weight = _sum(self._forward(compute, piece), piece.size)
            total, weight = total + part.detach(), weight + part_weight
            return part / samples

        times = [self.strategy.pass_on(compute, batch, loss) for batch in batches]
        self.strategy.arm(Sums(total, weight, float(self.wants_to_stop)), samples)
        forward, backward = map(sum, zip(*times, strict=True))
        return _Part(total, weight, forward, backward, False)

    def _forward(self, compute: Compute, piece: Batch) -> Value:
        if self._norms is not None:
            self._norms.copies = piece.copies
        if self.dropout is not None:
            self.dropout.at(piece.start, piece.size)
        if not self._use_autocast:
            return compute(piece)
        with self.switch.autocast():
            return compute(piece)

    def _backward(self, loss: torch.Tensor) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def _check_places(self, batches: Sequence[Batch]) -> None:
        if self.world.size > 1 and not all(batch.whole for batch in batches):
            raise DataError(
                "dropout by sample wants to know where in the batch of all ranks these samples are",
                do="let Flatout hand out each rank's part of a batch (no shard by files or rows); "
                "give a Batch of your own its `start` and `whole`",
            )

    def pieces_on_all_ranks(self, batch: Batch) -> int:
        """Into how many: equally many on each where what they compute has collectives in it."""
        wanted = pieces_for(batch.size, self.micro_batch) * self.pieces
        may_differ = isinstance(self.micro_batch, int) or wanted > 1
        if not may_differ or not self._meets_in_compute:
            return wanted
        table = torch.zeros(2, self.world.size, dtype=torch.int64)
        table[:, self.world.rank] = torch.tensor([wanted, batch.size])
        self.world.sum(table, "number of micro-batches")
        # No rank has fewer samples than pieces.
        return min(int(table[0].max()), int(table[1].min()))

    def _all_together(self) -> AbstractContextManager[None]:
        """Within, all ranks run the same forward and backward, and draw each their own numbers."""
        # Before steps are those of all ranks, each tries settings alone.
        return _NO_OTHERS if self.world.size == 1 else self._of_all_ranks()

    @contextmanager
    def _of_all_ranks(self) -> Iterator[None]:
        norms = _NO_OTHERS if self._norms is None else self._norms.together()
        with rank_rng(self.world), norms:
            yield

    def meet(self, world: World) -> None:
        """Let BatchNorm layers take any part of a batch, before steps are those of all ranks."""
        self._norms = SyncBatchNorm(self.switch.model, world)

    def train_with(self, world: World, samples: float, strategy: Strategy) -> None:
        """From now on steps are those of all ranks.

        Args:
            world: of this rank.
            samples: about how many samples of all ranks make a step: only a scale.
            strategy: how they become so.
        """
        self.world, self.samples = world, max(1.0, samples)
        self._moves = None
        self.strategy = strategy

    def begin(self) -> None:
        """All that is looked at before the first step is done: let the strategy lay things out."""
        self.strategy.begin()
        for turn in self.turns.values():
            turn.update.across = self.strategy.across
            turn.update.refresh()

    def meet_others(self) -> None:
        """Make the ranks alike, where they step alone or have parts of tables; all call it."""
        self.switch.gather_rows()
        if not self.strategy.steps_apart:
            return
        self.switch.settle_rows()
        self.stopping = self.strategy.meet() or self.stopping
        for turn in self.turns.values():
            turn.mean_loss.share(self.world)

    @property
    def _meets_in_compute(self) -> bool:
        """Whether ranks wait for one another in forward: BatchNorm, losses of Keras, tables."""
        has_norms = self._norms is not None and self._norms.has_layers
        is_sharded = self.switch.shards is not None
        if is_sharded or self.strategy.meets_in_compute:
            return True
        return has_norms or adapter_of(self.switch.model).meets_in_loss

    @property
    def together(self) -> World:
        """The ranks that run the same code right now: all within a step, else this one alone."""
        return ONE if self._norms is None else self._norms.world

    def close(self, error: BaseException | None = None) -> None:
        """Take off what was put on the model's parameters.

        Args:
            error: what has ended the training, where it has failed.
        """
        self.strategy.close(error)
        if self._norms is not None:
            self._norms.close()
            self._norms = None

    def _divide(self, samples: float, weight: torch.Tensor | float) -> None:
        """Gradients were divided by the sample count; make that the loss's own weight."""
        # Where reading costs nothing. Elsewhere a pass over the gradients is cheaper than waiting.
        is_known = not torch.is_tensor(weight) or weight.device.type == "cpu"
        if is_known and float(weight) == samples:
            return
        # In float64, so that a float64 model keeps its digits.
        factor = samples / _not_zero(weight, torch.float64)
        gradients = [p.grad for p in self.update.parameters if p.grad is not None]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, own in by_device.items():
            torch._foreach_mul_(own, factor.to(device) if torch.is_tensor(factor) else factor)

    def look(self, batch: Batch, at: Callable[[list[Batch]], _T]) -> _T:
        """What `at` gives for the pieces in which a step would run the batch, before any step.

        Where memory runs out they become smaller, for the steps too.

        Raises:
            OutOfMemory: as of a step.
        """
        while True:
            try:
                return at(batch.split(pieces_for(batch.size, self.micro_batch) * self.pieces))
            except (RuntimeError, MemoryError) as error:
                self._shrink(error, (batch,), 0)

    def _shrink(self, error: Exception, batches: Sequence[Batch], step: int) -> None:
        """After running out of memory: forget the attempt and split finer."""
        if not is_out_of_memory(error):
            raise error
        forget_frames(error)
        self.update.forget()
        if self.switch.device.type == "cuda":
            gave_way = features_give_way()
            torch.cuda.empty_cache()
            if gave_way:  # rows of features lay there that are elsewhere, too
                return
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
        is_sharded = step > 0 and self.switch.shards is not None
        meets = self.strategy.meets_in_compute or is_sharded
        if on_rank and (meets or adapter_of(self.switch.model).meets_in_loss):
            what = "Keras' losses"
            do = (
                f"set Memory(micro_batch={max(1, largest // 2)}), lower batch_size, or use "
                "Memory(activation_checkpointing='on')"
            )
            if self.strategy.takes_whole_batches:
                what = "micro-batches of a stage"
                do = "set a larger world.micro_batches, lower batch_size, or take more ranks"
            elif meets:
                what = "lookups in sharded tables" if is_sharded else "weights that are gathered"
            raise OutOfMemory(
                f"memory ran out{on_rank}, and {what} may meet other ranks' within a "
                "step, so that none can take its part again",
                where=f"{when}, batch of {largest}",
                do=do,
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


def mean_of_value(value: Value, size: int) -> tuple[torch.Tensor, torch.Tensor | float]:
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
