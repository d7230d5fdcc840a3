"""Parity: what a change of settings does to the result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from flatout.errors import RecipeError


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


def redrawn_if(draws: bool, otherwise: Parity) -> Parity:
    return Parity.REDRAWN if draws else otherwise
