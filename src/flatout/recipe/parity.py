"""Parity: the effect of a changed setting on the result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from flatout.errors import RecipeError


class Parity(IntEnum):
    """Effect of a change on the result, from none to a different training; later is worse."""

    EXACT = 0
    TOLERANT = 1
    REDRAWN = 2
    LEARNING = 3

    @property
    def words(self) -> str:
        """The words that users see."""
        return _WORDS[self]

    @classmethod
    def from_name(cls, name: str) -> Parity:
        """Return the parity of a name such as `tolerant`, as in `allow="tolerant"`."""
        names = {parity.name.lower(): parity for parity in cls}
        return _looked_up(name, names)

    @classmethod
    def from_words(cls, words: str) -> Parity:
        """Return the parity whose `words` these are."""
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
    """Facts about the model on which the parity of a change depends, in addition to the change.

    Args:
        batch_coupled: a sample's result depends on the other samples of its batch in training, as
            with BatchNorm or a contrastive loss.
        draws_random: the model draws random numbers in training, as with dropout.
        device: the type of device that computes.
        draws_random_in_input: samples are augmented at random while they are loaded.
        draws_by_layout: some random numbers are drawn per element of image-shaped activations, so
            that the memory format decides which element gets which number. This holds for
            `nn.Dropout` on a convolution's output, but not after `Flatten`, nor for `nn.Dropout2d`.
            Matters only with `draws_random`.
        rewrites_round: rewriting this model changes rounding, as with Keras' layers.
        draws_by_sample: the model's random numbers are a function of the sample, so that layout,
            micro-batches and device do not change them. Matters only with `draws_random`.
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
        """True if random numbers depend on those drawn before."""
        return self.draws_random and not self.draws_by_sample


def redrawn_if(draws: bool, otherwise: Parity) -> Parity:
    return Parity.REDRAWN if draws else otherwise
