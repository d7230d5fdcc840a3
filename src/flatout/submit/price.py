"""The cost of a job, from the price of a node and hour that the user has given."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flatout.errors import SubmitError
from flatout.words import is_currency

_HOUR_S = 3600


@dataclass(frozen=True)
class Price:
    """The price of a node and hour, and its currency by the code of ISO 4217."""

    per_hour: float
    currency: str

    def of(self, nodes: int, seconds: float) -> float:
        """Return the cost of nodes for some seconds."""
        return self.per_hour * nodes * seconds / _HOUR_S

    def words(self, cost: float) -> str:
        """Return a cost for people: "1,204.50 USD"."""
        return f"{cost:,.2f} {self.currency}"


def price_of(per_hour: float | None, currency: str | None) -> Price | None:
    """Return the price that the user has given, or None."""
    if per_hour is None and currency is None:
        return None
    if per_hour is None:
        raise SubmitError(
            f"--currency {currency}, but no price",
            do="say what a node costs for an hour: --price 0.68",
        )
    if not (math.isfinite(per_hour) and per_hour > 0):
        raise SubmitError(f"expected a price above 0 of a node for an hour; found {per_hour}")
    if currency is None:
        raise SubmitError(
            f"--price {per_hour:g}, but not in which currency", do="add --currency USD, or another"
        )
    if not is_currency(currency):
        raise SubmitError(
            f"expected a currency by its code of three capital letters, such as USD or EUR; found "
            f"{currency!r}"
        )
    return Price(per_hour, currency)


@dataclass(frozen=True)
class Cost:
    """The cost of a job so far, and of its rest; None where the rest's time is unknown."""

    price: Price
    so_far: float
    to_come: float | None

    def __str__(self) -> str:
        words = self.price.words(self.so_far)
        if self.to_come == 0.0:
            return f"cost {words}"
        rest = "" if self.to_come is None else f", about {self.price.words(self.to_come)} to come"
        return f"cost {words} so far{rest}"
