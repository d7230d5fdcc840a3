"""The section `memory`: how a step's memory is used."""

from typing import Literal

from flatout.recipe.parity import ModelFacts, Parity, redrawn_if
from flatout.recipe.setting import Live, OnOff, Positive, Section, Trial, setting


def _micro_batch(facts: ModelFacts) -> Parity:
    # BatchNorm would compute its statistics over fewer samples.
    if facts.batch_coupled:
        return Parity.LEARNING
    return redrawn_if(facts.draws_from_a_stream, Parity.TOLERANT)


class Memory(Section):
    """How a step's memory is used."""

    micro_batch: Literal["auto", "whole"] | Positive = setting(
        "auto",
        "How many samples go through the model at once. A batch is computed in parts of this size "
        "and updates the weights once; the global batch stays the same. `auto` is `whole`, and "
        "parts where memory does not suffice.",
        plain="whole",
        parity=_micro_batch,
        words="micro-batch {}",
        unmeasured=lambda at: ("whole", "split only if memory runs out"),
    )
    activation_checkpointing: OnOff = setting(
        "off",
        "Compute activations again in the backward pass rather than keep them: less memory, more "
        "time.",
        # The second forward uses the random state and buffers of the first, and changes neither.
        parity=Parity.EXACT,
        words="activation checkpointing",
        live=Live(lambda at, value: at.recompute_activations(), layer=1, in_graph=False),
    )
    allocator: Literal["auto", "default", "keep"] = setting(
        "auto",
        "`keep` tells the C allocator not to hand memory back to the system after each step, "
        "which saves page faults.",
        plain="default",
        parity=Parity.EXACT,
        words="memory kept by the allocator",
        trial=Trial("keep", lambda job: job.returns_memory, why="fewer page faults"),
        live=Live(
            lambda at, value: at.set_allocator(value),
            now=lambda at: at.allocator.current(),
            switches="once",
            in_passes=False,
        ),
        unmeasured=lambda at: (at.now.allocator, "as the process started"),
    )
