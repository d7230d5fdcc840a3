"""The learning rate for another global batch than the one it was found with.

A rule multiplies the rates of the user's optimizer and scheduler, in each step anew and only during
the optimizer's step. Outside of it the rates stay the user's: the schedule runs as if there were no
rule, and a checkpoint holds its rates. The factor depends on the step's number only, so that a
resumed run needs no further state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from flatout.errors import ModelError
from flatout.optim.adapter import Optimizers, as_tuple, optimizer_adapter
from flatout.words import counted, rounded

RULES = ("linear", "sqrt", "power", "none")


@dataclass(frozen=True)
class LrRule:
    """A rule that adapts the learning rate to the global batch. It applies only if the user asks.

    With k = global batch / reference batch, the rate is multiplied by

        "linear"   k               for SGD: Krizhevsky 2014, Goyal et al. 2017
        "sqrt"     sqrt(k)         for Adam and the like: You et al. 2020, Malladi et al. 2022
        "power"    k ** exponent   in between: a damped factor
        "none"     1               the rate as it is, and the history says so

    The global batch is all samples of one optimizer step: of all ranks, and of all batches that
    `accumulate` puts together.

    Args:
        rule: one of these names.
        reference_batch: the global batch, in samples, that the learning rate was found with.
        warm_up: epochs in which the rate rises, by the same amount in each step, from the rate for
            the reference batch to the multiplied rate (Goyal et al. 2017 took 5).
        warm_up_steps: the same in optimizer steps, in place of `warm_up`.
        exponent: exponent of "power", above 0 and up to 1.
        most: largest factor, above 1. With `LrRule("sqrt", 64, most=1.5)` a rate of 0.001 becomes
            0.0015 from four times the batch on.

    Raises:
        ModelError: for an unknown rule, or a value out of its range.
    """

    rule: str
    reference_batch: int
    warm_up: float = 0
    warm_up_steps: int | None = None
    exponent: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ModelError(
                f"unknown learning-rate rule {self.rule!r}; known: {', '.join(RULES)}",
                do="LrRule('linear', reference_batch=256), or leave lr_rule out",
            )
        _check_whole("reference_batch", self.reference_batch, 1)
        if self.warm_up_steps is not None:
            _check_whole("warm_up_steps", self.warm_up_steps, 0)
        if not _is_number(self.warm_up) or self.warm_up < 0:
            raise ModelError(f"warm_up is a number of epochs, 0 or more, found {self.warm_up!r}")
        if self.warm_up and self.warm_up_steps is not None:
            raise ModelError("both warm_up and warm_up_steps are given", do="give one of them")
        if self.rule == "none" and (self.warm_up or self.warm_up_steps):
            raise ModelError(
                "rule 'none' leaves the rate as it is, so there is nothing to warm up to",
                do="leave warm_up out, or choose another rule",
            )
        if (self.rule == "power") != (self.exponent is not None):
            raise ModelError(
                f"an exponent belongs to rule 'power', found {self.rule!r} with {self.exponent!r}",
                do="LrRule('power', reference_batch=256, exponent=0.75)",
            )
        if self.exponent is not None and not (_is_number(self.exponent) and 0 < self.exponent <= 1):
            raise ModelError(f"an exponent is above 0 and at most 1, found {self.exponent!r}")
        if self.most is not None:
            self._check_most(self.most)

    def _check_most(self, most: Any) -> None:
        if self.rule == "none":
            raise ModelError(
                "rule 'none' leaves the rate as it is, so there is nothing to limit",
                do="leave most out, or choose another rule",
            )
        if not (_is_number(most) and most > 1):
            raise ModelError(f"most is what a rate is multiplied by, above 1, found {most!r}")

    def factor(self, batch: int) -> float:
        """Return the factor of the learning rate for a global batch of `batch` samples."""
        return min(self._factor(batch / self.reference_batch), self.most or math.inf)

    def _factor(self, times: float) -> float:
        if self.rule == "linear":
            return times
        if self.rule == "sqrt":
            return math.sqrt(times)
        return 1.0 if self.exponent is None else float(times**self.exponent)

    def for_batch(self, batch: int, steps_per_epoch: int | None) -> LrScale:
        """Return the effect of the rule on a job.

        Args:
            batch: samples of one optimizer step, of all ranks.
            steps_per_epoch: optimizer steps, or None if unknown.

        Raises:
            ModelError: for a warm-up in epochs if the steps of an epoch are unknown.
        """
        factor = self.factor(batch)
        if factor <= 1:  # a warm-up toward a smaller rate would begin above that rate
            return LrScale(self, batch, factor, 0)
        if self.warm_up_steps is not None or not self.warm_up:
            return LrScale(self, batch, factor, self.warm_up_steps or 0)
        if steps_per_epoch is None:
            raise ModelError(
                f"a warm-up of {self.warm_up:g} epochs, but the data do not say how many steps an "
                "epoch has",
                do="give LrRule warm_up_steps in place of warm_up",
            )
        return LrScale(self, batch, factor, max(1, round(self.warm_up * steps_per_epoch)))

    def as_dict(self) -> dict[str, Any]:
        """Return the rule as plain data, without options at their defaults."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class LrScale:
    """The effect of a rule on a job.

    Attributes:
        rule: the user's rule.
        batch: samples of one optimizer step, of all ranks.
        factor: factor of the learning rates after the warm-up.
        warm_up_steps: optimizer steps of the warm-up.
    """

    rule: LrRule
    batch: int
    factor: float
    warm_up_steps: int

    def at(self, step: int) -> float:
        """Return the factor in optimizer step `step`, counted from 0 since training began."""
        if step >= self.warm_up_steps:
            return self.factor
        return 1 + (self.factor - 1) * step / self.warm_up_steps

    @property
    def changes(self) -> bool:
        """True if the rule changes any rate."""
        return self.factor != 1

    def words(self, rates: list[float], *, scheduled: bool) -> str:
        """Describe the rule's effect in one line.

        Args:
            rates: learning rates of the optimizer's parameter groups, without the rule.
            scheduled: whether these rates change during training.
        """
        rule, given = self.rule, _listed(rates)
        if not self.changes and rule.rule != "none":
            return f"learning rate {given} as given: {self.batch:,} is the batch it was found with"
        batch = f"batch {self.batch:,} instead of {rule.reference_batch:,}"
        if not self.changes:
            return f"learning rate {given} as given: rule 'none' for {batch}"
        done = f"learning rate {given} -> {_listed([r * self.factor for r in rates])}"
        if scheduled:
            done = f"learning rate of the schedule times {rounded(self.factor, 4)}"
        name = f"power {rule.exponent:g}" if rule.exponent is not None else rule.rule
        limit = f", at most {rule.most:g} times," if self.factor == rule.most else ""
        return f"{done}: {name} rule{limit} for {batch}{self._warm_up_words()}"

    def _warm_up_words(self) -> str:
        if self.warm_up_steps:
            steps = counted(self.warm_up_steps, "step")
            epochs = self.rule.warm_up
            if not epochs:
                return f", warm-up over {steps}"
            return f", warm-up over {epochs:g} epoch{'s' * (epochs != 1)} ({steps})"
        if self.rule.warm_up or self.rule.warm_up_steps:
            return ", no warm-up, because it falls"
        return ""

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.rule.as_dict(),
            "batch": self.batch,
            "factor": self.factor,
            "warm_up_steps": self.warm_up_steps,
        }


@contextmanager
def scaled(optimizers: Optimizers, factor: float) -> Iterator[None]:
    """Multiply the learning rates of all parameter groups by `factor` in the block."""
    with ExitStack() as each:
        for optimizer in as_tuple(optimizers):
            each.enter_context(optimizer_adapter(optimizer).scaled(factor))
        yield


def rates_of(optimizers: Optimizers) -> list[float]:
    """Return the different learning rates of the parameter groups, in their order."""
    groups = [group for optimizer in as_tuple(optimizers) for group in optimizer.param_groups]
    return list(dict.fromkeys(float(group["lr"]) for group in groups))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelError(f"{name} is a whole number of at least {least}, found {value!r}")


def _listed(rates: list[float]) -> str:
    return ", ".join(rounded(rate, 4) for rate in rates)
