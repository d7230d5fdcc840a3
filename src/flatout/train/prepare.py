"""First actions of `Loop.prepare`: placing the model, and reading the first batches."""

from __future__ import annotations

from torch import nn

from flatout.data import Batch, Pipeline, Source, is_pipe
from flatout.devices import place
from flatout.strategies import check_reduction, check_settings
from flatout.train.decide import samples_of
from flatout.train.held_state import HeldState
from flatout.train.large_batch import resumed_words, scale_rates
from flatout.train.loop_state import LoopState
from flatout.train.loop_values import Placed
from flatout.train.losses.loss_value import Compute
from flatout.train.preflight import check_last_batch
from flatout.train.rank_device import device_here
from flatout.train.ranks import agreed, check_ranks, jagged_in_stages, part_of
from flatout.train.resume.resume import first_samples, source_state
from flatout.train.tuning.auto import seconds_of


def place_model(loop: LoopState, model: nn.Module) -> list[str]:
    """Move the model and its optimizers' state; return lines for the user about the device."""
    asked = loop.asked.recipe.world
    device, why = device_here(asked)
    loop.feed.set_device(device)
    placement = place(model, loop.device, strict=asked.placement == "strict")
    loop.placed = Placed(placement, why)
    words = placement.describe_fallbacks()
    if asked.device not in ("auto", str(loop.device), loop.device.type):
        words.insert(0, f"running on {loop.device} {why}")
    for line in words:
        loop.say(line)
    for optimizer in loop.optimizers:
        if loop.device.type != "cpu" and optimizer.state:
            # Existing state must follow its parameters: torch moves the state that it loads.
            optimizer.load_state_dict(optimizer.state_dict())
    return words


def first_batches(loop: LoopState, data: Source | None, compute: Compute | None) -> list[Batch]:
    """Return the first batches on the device, after all checks that are possible before a step."""
    if data is not None and is_pipe(data):
        data = agreed(data, loop.world)
    if data is not None and loop.run is not None:
        # The digest of the data is computed before any function that draws random numbers has run.
        loop.identity.data = source_state(data)
    check_ranks(loop.model, data, loop.world, loop.say)
    check_reduction(loop.asked.recipe.world, loop.world, loop.say)
    if loop.world.size > 1:
        check_settings(loop.asked.recipe)
    loop.feed.source = data
    if data is None or compute is None:
        return []
    part = part_of(data, loop.world, loop.note, whole=loop.is_staged)
    first: list[Batch] = []
    # This saves the remaining state of a user's dataset, such as a generator or a counter.
    held = HeldState(part, most_bytes=0)
    try:
        peeked_s = seconds_of(lambda: first.extend(part.peek(2)), loop.terms.clock)
    finally:
        held.restore()
    loop.first_batches.seconds = peeked_s / max(1, len(first))
    if loop.is_staged and any(batch.is_jagged for batch in first):
        raise jagged_in_stages()
    # A rank may have no batch while other ranks have batches; all ranks call this.
    loop.first_batches.size = round(sum(loop.world.gather(samples_of(first)))) or None
    loop.first_batches.are_own = loop.world.size > 1 and not isinstance(data, Pipeline)
    loop.first_batches.are_own &= any(batch.is_jagged for batch in first)
    if first:
        # The first rank's part begins with the same samples for any number of ranks.
        loop.first_batches.samples = first_samples(first) if loop.world.is_first else None
        if loop.resume is not None:
            loop.resume.check_data(part, loop.first_batches.samples)
    ready = [loop.feed.first(batch) for batch in first]
    if ready:
        check_last_batch(loop.model, compute, ready, data)
    return ready


def follow_rule(loop: LoopState) -> None:
    """Apply the user's learning-rate rule; trials ran without it."""
    scale, words = scale_rates(
        loop.asked.lr_rule,
        loop.optimizers,
        loop.feed.source,
        loop.first_batches.size,
        loop.asked.accumulate,
        scheduled=bool(loop.schedulers),
        own_batches=loop.first_batches.are_own,
    )
    if loop.resume is None:
        loop.stepper.notes += words  # after a resume the History has these notes
    elif scale is not None and scale.changes:
        words = [resumed_words(scale, loop.step_count)]
    for line in words:
        loop.say(line)
    loop.stepper.lr_scale = scale
