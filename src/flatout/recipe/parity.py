"""Parity: what a change of settings does to the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from flatout.errors import RecipeError
from flatout.recipe.sections import Value, split


class Parity(IntEnum):
    """What a change does to the result, from nothing to everything; later is worse."""

    EXACT = 0
    TOLERANT = 1
    REDRAWN = 2
    LEARNING = 3

    @property
    def words(self) -> str:
        """The wording that users see."""
        return _WORDS[self]

    @classmethod
    def from_name(cls, name: str) -> Parity:
        """Return the parity of a name such as `tolerant`, as in `allow="tolerant"`.

        Raises:
            RecipeError: the name is none of exact, tolerant, redrawn, learning.
        """
        names = {parity.name.lower(): parity for parity in cls}
        return _looked_up(name, names)

    @classmethod
    def from_words(cls, words: str) -> Parity:
        """Return the parity whose `words` these are.

        Raises:
            RecipeError: the words are none of the four.
        """
        return _looked_up(words, {parity.words: parity for parity in cls})


_WORDS = {
    Parity.EXACT: "bit-identical",
    Parity.TOLERANT: "rounding",
    Parity.REDRAWN: "redrawn",
    Parity.LEARNING: "changes learning",
}


def _looked_up(name: str, names: dict[str, Parity]) -> Parity:
    if name not in names:
        raise RecipeError(f"parity cannot be {name!r}; allowed: {', '.join(names)}")
    return names[name]


@dataclass(frozen=True)
class ModelFacts:
    """What the parity of a change depends on, beside the change itself.

    Args:
        batch_coupled: a sample's result depends on the others of its batch in training, as with
            BatchNorm or a contrastive loss.
        draws_random: the model draws random numbers in training, as with dropout.
        device: the device type that computes.
        draws_random_in_input: samples are augmented at random while they are loaded.
        draws_by_layout: some draws fall element by element on image-shaped activations, so that the
            memory format decides which element gets which draw (`nn.Dropout` on a convolution's
            output; not after `Flatten`, and not `nn.Dropout2d`). Matters only with `draws_random`.
        rewrites_round: rewriting this model changes rounding, as with Keras' layers.
        draws_by_sample: what the model draws is a function of the sample, so that neither layout
            nor micro-batches nor the device change it. Matters only with `draws_random`.
    """

    batch_coupled: bool = False
    draws_random: bool = False
    device: str = "cpu"
    draws_random_in_input: bool = False
    draws_by_layout: bool = True
    rewrites_round: bool = False
    draws_by_sample: bool = False

    @property
    def draws_from_a_stream(self) -> bool:
        """Whether what is drawn depends on what was drawn before."""
        return self.draws_random and not self.draws_by_sample


def of_change(field: str, before: Value, after: Value, facts: ModelFacts) -> Parity:
    """Judge what changing one field does to the result of training this model.

    Args:
        field: the dotted name, as in "compute.precision".
        before: the concrete value that the result is compared with.
        after: the concrete value that is judged.
        facts: what is known of the model and its input.

    Raises:
        RecipeError: no field has this name.
    """
    split(field)
    if before == after:
        return Parity.EXACT
    if field in LEARNS and LEARNS[field] in (before, after):
        return Parity.LEARNING
    rule = _RULES[field]
    return rule if isinstance(rule, Parity) else rule(facts)


def _redrawn_if(draws: bool, otherwise: Parity) -> Parity:
    return Parity.REDRAWN if draws else otherwise


def _memory_format(facts: ModelFacts) -> Parity:
    # Other kernels round otherwise, and torch fills a random mask in the order of memory.
    return _redrawn_if(facts.draws_from_a_stream and facts.draws_by_layout, Parity.TOLERANT)


def _micro_batch(facts: ModelFacts) -> Parity:
    # BatchNorm would take its statistics over fewer samples.
    if facts.batch_coupled:
        return Parity.LEARNING
    return _redrawn_if(facts.draws_from_a_stream, Parity.TOLERANT)


LEARNS: dict[str, Value] = {"world.compression": "powersgd"}
"""Values that change what is learned, of fields whose other values do not."""

_RULES: dict[str, Parity | Callable[[ModelFacts], Parity]] = {
    "compute.precision": Parity.TOLERANT,
    "compute.memory_format": _memory_format,
    # Keras' layers get their bias inside of the operator, which rounds otherwise.
    "compute.rewrites": lambda facts: Parity.TOLERANT if facts.rewrites_round else Parity.EXACT,
    "compute.fused_optimizer": Parity.TOLERANT,
    # Inductor draws its random numbers from streams of its own.
    "compute.compile": lambda facts: _redrawn_if(facts.draws_random, Parity.TOLERANT),
    "compute.matmul_precision": Parity.TOLERANT,
    "compute.dropout": lambda facts: _redrawn_if(facts.draws_random, Parity.EXACT),
    "compute.deterministic": Parity.TOLERANT,
    "memory.micro_batch": _micro_batch,
    # The second forward has the random state and the buffers of the first, and updates neither.
    "memory.activation_checkpointing": Parity.EXACT,
    "memory.allocator": Parity.EXACT,
    "process.threads": Parity.TOLERANT,
    # No operator of a step is divided among these threads, so no sum changes its order.
    "process.interop_threads": Parity.EXACT,
    "process.affinity": Parity.EXACT,
    "process.flush_denormals": Parity.TOLERANT,
    # The order is a function of seed, epoch and counter; only draws made in the workers move.
    "input.workers": lambda facts: _redrawn_if(facts.draws_random_in_input, Parity.EXACT),
    "input.pin_memory": Parity.EXACT,
    # Each kind of device has its own random streams.
    "world.device": lambda facts: _redrawn_if(facts.draws_from_a_stream, Parity.TOLERANT),
    "world.placement": Parity.EXACT,
    # The same numbers added up in another order.
    "world.reduction": Parity.TOLERANT,
    # Half precision rounds each gradient, as it does in compute.precision.
    "world.compression": Parity.TOLERANT,
    "world.powersgd_rank": Parity.LEARNING,
    "world.timeout": Parity.EXACT,
    "world.patience": Parity.EXACT,
    "save.every": Parity.EXACT,
    "save.keep_last": Parity.EXACT,
    "save.asynchronous": Parity.EXACT,
    "save.pieces": Parity.EXACT,
    # Workers that stay go on with their random streams; new ones begin with fresh seeds.
    "script.persistent_workers": lambda facts: _redrawn_if(
        facts.draws_random_in_input, Parity.EXACT
    ),
    # Only samples that are the same each time are kept.
    "script.cache": Parity.EXACT,
    # A sample's features are those of the batch in which it came first.
    "script.features": Parity.TOLERANT,
    "script.zero_grad": Parity.EXACT,
    "script.garbage": Parity.EXACT,
    "script.empty_cache": Parity.EXACT,
    "script.host_syncs": Parity.EXACT,
    "script.log_every": Parity.EXACT,
    "script.evaluation": Parity.EXACT,
    # Other kernels round otherwise.
    "script.cudnn_benchmark": Parity.TOLERANT,
    # The same gradients added up in another order.
    "script.gradient_sync": Parity.TOLERANT,
    "script.unused_parameters": Parity.EXACT,
}
