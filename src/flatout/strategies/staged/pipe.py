"""One rank's stage in torch.distributed.pipelining: schedules, and additions to torch's stages.

torch's stages need micro-batches of one size. Here receive buffers are made for each micro-batch,
so that the last one of a batch may be smaller. Waiting is logged as a collective of the World, and
computing is not. So a rank that hangs is named, and the time of waiting is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns as clock
from typing import Any

import torch
from torch import fx
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
)

from flatout.strategies.staged.shapes import Shape, no_fast_attention, shape_of, unlike_form
from flatout.world import Group, World

Sent = list[list[Shape]]
"""The shapes of the tensors that cross, for each micro-batch."""

Loss = Callable[[tuple[torch.Tensor, ...], int], torch.Tensor]
"""The loss of a micro-batch's output, with the number of the micro-batch."""

Within = Callable[[], AbstractContextManager[Any]]


class Failed(BaseException):
    """Raised when the rank's own code fails within a schedule, which catches other errors."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Clock:
    """A clock of the time that a rank computes within a schedule."""

    def __init__(self, world: World) -> None:
        self._log = world.collectives
        self.forward = self.backward = 0

    @contextmanager
    def computing(self, lane: str) -> Iterator[None]:
        """Count the time of the block as computing, not as waiting for other ranks."""
        log = self._log
        waiting, log.waiting = log.waiting, None
        start = clock()
        try:
            yield
        except Failed:
            raise
        except BaseException as error:
            # In backward, torch's own error names the computation; its cause is the real error.
            own = error.__cause__ if lane == "backward" else None
            raise Failed(own or error) from error
        finally:
            took = clock() - start
            log.waited -= took
            setattr(self, lane, getattr(self, lane) + took)
            log.waiting = None if waiting is None else waiting._replace(since=clock())


class OwnStage(PipelineStage):
    """A stage whose micro-batches may be of different sizes."""

    def __init__(
        self,
        module: fx.GraphModule,
        place: int,
        places: int,
        group: Group,
        given: Sent,
        gives: Sent,
        clock: Clock,
        within: Within,
    ) -> None:
        super().__init__(
            module,
            place,
            places,
            torch.device("cpu"),
            input_args=tuple(item.like("meta") for item in given[0]),
            output_args=tuple(item.like("meta") for item in gives[0]),
            group=group.channel,
        )
        self._given, self._gives, self._clock, self._within = given, gives, clock, within

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        if not self.is_first:
            for chunk, infos in self.args_recv_info.items():
                _make_room(infos, self._given[chunk])

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        if not self.is_last:
            for chunk, infos in self.grad_recv_info.items():
                _make_room(infos, self._gives[chunk])

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        sent, expected = self.fwd_cache[fwd_chunk_id][0], self._gives[fwd_chunk_id]
        for value, shape in zip(sent, expected, strict=True):
            if (tuple(value.shape), value.dtype) != shape[:2]:
                raise Failed(unlike_form(shape_of(value), shape))
        return list(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        result = self.bwd_cache.get(bwd_chunk_id)
        if result is not None and not self.is_first:
            self.bwd_cache[bwd_chunk_id] = tuple(
                _as_sent(gradient, shape)
                for gradient, shape in zip(result, self._given[bwd_chunk_id], strict=True)
            )
        return list(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.computing("forward"), self._within(), no_fast_attention():
            result = self.submod(*args, **kwargs)
            return tuple(value.contiguous() for value in result)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        given = bwd_kwargs["stage_output"]
        outputs = given if isinstance(given, tuple) else (given,)
        if not any(value.requires_grad for value in outputs):
            return tuple(None for _ in bwd_kwargs["input_values"]), None
        with self._clock.computing("backward"):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


def _make_room(infos: Sequence[Any], shapes: Sequence[Shape]) -> None:
    for info, shape in zip(infos, shapes, strict=True):
        if info.buffer is not None:
            info.buffer = torch.empty(shape.size, dtype=shape.dtype)


def _as_sent(gradient: torch.Tensor | None, shape: Shape) -> torch.Tensor | None:
    if gradient is None:
        return torch.zeros(shape.size, dtype=shape.dtype) if shape.requires_grad else None
    return gradient.contiguous()


class ScheduleRun:
    """A schedule for batches of one form."""

    def __init__(
        self,
        world: World,
        stage: OwnStage,
        micro_batches: int,
        schedule: str,
        *,
        trains: bool,
    ) -> None:
        self._world, self._stage, self._count = world, stage, micro_batches
        given: dict[str, Any] = {
            "n_microbatches": micro_batches,
            "loss_fn": self._loss_of if trains else None,
            "scale_grads": False,
        }
        self._schedule: Any
        if schedule == "1f1b" and micro_batches >= stage.num_stages and trains:
            self._schedule = Schedule1F1B(stage, **given)
        else:
            self._schedule = ScheduleGPipe(stage, **given)
        self._loss: Loss | None = None
        self._trains = trains

    def _loss_of(self, output: tuple[torch.Tensor, ...], number: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        with self._stage._clock.computing("forward"):
            return self._loss(output, int(number))

    def __call__(self, inputs: Sequence[torch.Tensor], loss: Loss | None, what: str) -> Any:
        self._loss = loss
        args = tuple(inputs) if self._stage.is_first else ()
        target = torch.arange(self._count) if self._stage.is_last and self._trains else None
        try:
            with self._world.within(self._world.begun(None, what)):
                result = self._schedule.step(*args, target=target, return_outputs=not self._trains)
                self._stage.clear_runtime_states()
                return result
        except Failed as failed:
            raise failed.error from None
        finally:
            self._loss = None
