"""Data parallel training: every rank has the whole model and its part of each batch.

Each rank has the gradient of its part's loss *sum*. The gradients are summed in buckets, while
backward still computes the gradients of earlier layers (Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", 2020). The sums of losses and weights are
appended to the last bucket, so they need no collective of their own. The division by the weight
comes afterwards, exactly as on one rank. Two more numbers are appended: the parameters that any
rank has used, and whether any rank wants to stop. If gradients are compressed, or have few digits,
these numbers are summed exactly in a small bucket of their own.

Sparse gradients are in no bucket, and are summed after backward (sparse.py). Some layers declare
that their gradients are sparse. For other layers, ranks learn it in the first step with a sparse
gradient, from the numbers appended to the bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter_ns as clock
from typing import Any

import torch
from torch import nn

from flatout.optim import RowShards
from flatout.strategies.buckets import DENSE, SPARSE, Bucket, bucket_groups
from flatout.strategies.reductions import Reduction
from flatout.strategies.sparse import sparse_weights, sum_own_rows, sum_rows
from flatout.strategies.strategy import Strategy, Sums, Tensors
from flatout.world import World

# Maximum number of buckets of one set of optimizers, so that a bucket's number identifies the set.
_MOST_BUCKETS = 1 << 20
# Positions after the sums in the numbers that are summed with the gradients. _ARE_SPARSE: number of
# sparse gradients that are in buckets. _USED: begin of the parameters' uses (see `Bucket.used`).
_ARE_SPARSE, _USED = 3, 4


class _Summed:
    """Sums the gradients of all ranks, for some of the job's optimizers."""

    def __init__(
        self,
        world: World,
        parameters: Sequence[torch.Tensor],
        reduction: Reduction,
        *,
        sparse: Collection[torch.Tensor] = (),
        turn: int = 1,
        shards: RowShards | None = None,
    ) -> None:
        self.world, self.reduction, self._shards = world, reduction, shards
        self._of = parameters
        trained = [p for p in parameters if p.requires_grad]
        self._trained = len(trained)
        self.sparse = set(sparse)
        self._sparse = [p for p in trained if p in sparse]
        self.parameters = [p for p in trained if p not in sparse]
        self._device = trained[0].device
        groups = bucket_groups(self.parameters)
        count = _USED + len(self.parameters)
        # Numbers in the last bucket need no further collective.
        self._rides = _has_room_for_numbers(groups, reduction)
        names = [
            f"sum of gradients, bucket {n} of {len(groups)}" for n in range(1, len(groups) + 1)
        ]
        self._buckets = [
            Bucket(
                (turn - 1) * _MOST_BUCKETS + n,
                group,
                names[n],
                reduction,
                count if self._rides and n + 1 == len(groups) else 0,
            )
            for n, group in enumerate(groups)
        ]
        self._numbers = (
            self._buckets[-1].more
            if self._rides
            else torch.zeros(count, dtype=torch.float64, device=self._device)
        )
        self._own = Sums(0.0, 0.0, 0.0)
        self._next = 0
        self._armed = self._is_weighed = False
        self._armed_at = 0
        self.steps = self.sparse_bytes = 0
        self._are_some_sparse = False  # whether gradients in buckets are sparse
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_ready(bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        if parameters is not self._of:
            return False
        if sum([p.requires_grad for p in parameters]) != self._trained:
            return False
        if self._are_some_sparse:
            return False
        return all(
            parameter.stride() == view.stride()
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def arm(self, own: Sums, samples: float, scaler: torch.amp.GradScaler | None = None) -> None:
        self._own = own
        if self._shards is not None:
            self._shards.end_forward()
        if self.reduction.carries and not self._is_weighed:
            self._is_weighed = True
            weight = own.weight / samples
            number = torch.zeros((), dtype=torch.float64, device=self._device)
            number += weight if scaler is None else scaler.scale(number + weight)
            self.reduction.weigh(self.world.sum(number, "weight of the step", later=True), number)
        self._armed = True
        self._armed_at = clock()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def traffic(self) -> list[dict[str, float]]:
        return [
            {
                "bytes": bucket.flat.numel() * bucket.flat.element_size(),
                "ready_ms": bucket.ready_ns / max(1, self.steps) / 1e6,
            }
            for bucket in self._buckets
        ]

    def disarm(self) -> None:
        self._armed = False

    @torch.no_grad()
    def finish(self) -> Sums:
        if self._device.type == "cuda":
            # From here on this rank waits only for other ranks, not for its own backward.
            torch.cuda.current_stream(self._device).synchronize()
        self._armed = self._is_weighed = False
        while self._next < len(self._buckets):
            self._send_next()
        last = self._buckets[-1].sending if self._buckets else None
        if not self._rides:
            self._write_numbers()
            last = self.world.sum(self._numbers, "sum of the losses", later=True)
        assert last is not None
        shards = self._shards or ()
        if self._shards and (sharded := [table for table in self._sparse if table in shards]):
            # The buckets are summed at the same time.
            self.sparse_bytes += sum_own_rows(self.world, sharded, self._shards)
        for bucket in self._buckets:
            assert bucket.sending is not None
            self.world.until(bucket.sending)
            bucket.sending = None
        self.world.until_done(last)
        self._next = 0
        used = [item for bucket in self._buckets for item in bucket.used]
        with self.world.within(last):
            # A parameter that this rank has used is used. Other ranks' uses are read only if one is
            # missing.
            if not all(used) or self._numbers[_ARE_SPARSE] > 0:
                used = self._numbers[_USED:].tolist()
            own = self._give_out(used)
        for parameter, gradient in own:
            parameter.grad = gradient
            self.sparse.add(parameter)
            self._are_some_sparse = True
        tables = [*self._sparse, *(parameter for parameter, _ in own)]
        if whole := [table for table in tables if table not in shards]:
            self.sparse_bytes += sum_rows(self.world, whole)
        self.steps += 1
        # A copy, because the next step overwrites these numbers.
        total, weight, votes = self._numbers[:3].to(torch.float64, copy=True)
        return Sums(total, weight, votes)

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._rides and bucket is self._buckets[-1]:
            bucket.note_used()
            self._write_numbers()
        bucket.ready_ns += clock() - self._armed_at
        bucket.send(self.world, self.reduction)

    def _write_numbers(self) -> None:
        for place, number in enumerate(self._own):
            self._numbers[place] = number
        used = [item for bucket in self._buckets for item in bucket.used]
        self._numbers[_ARE_SPARSE] = used.count(SPARSE)
        if used.count(DENSE) == len(used):
            self._numbers[_USED:] = DENSE
        else:
            self._numbers[_USED:] = torch.tensor(used, dtype=self._numbers.dtype)

    def _give_out(self, used: Sequence[float]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        each = iter(used)
        own = []
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                use = next(each)
                if use >= SPARSE:
                    own.append((parameter, parameter.grad))
                # It is unused in this step, but an error of earlier steps may belong to it.
                has_one = use or (self.reduction.carries and bool(view.any()))
                parameter.grad = view if has_one else None
        return own

    def _on_ready(self, bucket: Bucket) -> Any:
        def ready(_: torch.Tensor) -> None:
            if not self._armed:
                return
            bucket.missing -= 1
            # All ranks send buckets in the same order, whatever the order of their backward passes.
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                with torch.no_grad():
                    self._send_next()

        return ready


class Ddp(Strategy):
    """Sums the gradients of all ranks, so that all ranks make the same step.

    Args:
        shards: the tables of which each rank steps only its own rows, or None.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        reduction: Reduction,
        shards: RowShards | None = None,
    ) -> None:
        super().__init__()
        self._world, self._model, self.reduction = world, model, reduction
        self._shards = shards
        # By turn: several optimizers may step in turn.
        self._turns: dict[int, _Summed] = {}

    def before_step(self, turn: int, parameters: Tensors) -> None:
        """Begin a step, and make buckets for its parameters if there are none."""
        now = self._turns.get(turn)
        if now is None or not now.is_of(parameters):
            sparse = sparse_weights(self._model)
            if now is not None:
                sparse |= now.sparse
                now.close()
            now = _Summed(
                self._world,
                parameters,
                self.reduction,
                sparse=sparse,
                turn=turn,
                shards=self._shards,
            )
            self._turns[turn] = now
        self._now = now

    def arm(self, own: Sums, samples: float, scaler: torch.amp.GradScaler | None = None) -> None:
        """Send each bucket once it is full in the next backward, which completes the gradients."""
        self._now.arm(own, samples, scaler)

    def disarm(self) -> None:
        """Stop waiting for gradients, because the backward has failed."""
        self._now.disarm()

    def finish(self) -> Sums:
        """Wait for all sums, and set them as gradients."""
        return self._now.finish()

    def traffic(self) -> dict[str, Any]:
        """Return the buckets of the gradients, and the bytes of tables' rows in a step."""
        turns = list(self._turns.values())
        steps = max((turn.steps for turn in turns), default=0)
        return {
            "buckets": [bucket for turn in turns for bucket in turn.traffic()],
            "sparse_bytes_per_step": sum(turn.sparse_bytes for turn in turns) / max(1, steps),
        }

    def own_state(self) -> dict[str, Any] | None:
        """Return the errors of compression, which this rank adds to later gradients."""
        return self.reduction.state_dict() if self.reduction.carries else None

    def load_own_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the errors of all ranks."""
        self.reduction.load_state_dicts(states)

    def renew(self) -> None:
        """Drop the buckets, because gradients may become sparse or dense."""
        for turn in self._turns.values():
            turn.close()
        self._turns.clear()

    def close(self, error: BaseException | None = None) -> None:
        """Remove the hooks from the parameters, and end the reduction."""
        self.renew()
        self.reduction.close()


def _has_room_for_numbers(groups: Sequence[Sequence[torch.Tensor]], reduction: Reduction) -> bool:
    kinds = {parameter.dtype for group in groups for parameter in group}
    return bool(groups) and reduction.is_exact and kinds in ({torch.float32}, {torch.float64})
