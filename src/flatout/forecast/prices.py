"""Prices of hosts. Only the user gives them, since they differ by region and by day."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import FlatoutError
from flatout.words import is_currency

_EXAMPLE = "--price c5.4xlarge=0.68 --currency USD"


@dataclass(frozen=True)
class Prices:
    """Names and hourly prices of hosts in the given order, and a currency such as "USD"."""

    hosts: tuple[tuple[str, float], ...]
    currency: str

    @classmethod
    def parse(cls, text: str, currency: str | None) -> Prices:
        """Read "NAME=PRICE,..." or a file of TOML with `currency` and a table `prices`.

        Raises:
            FlatoutError: a price or the currency is missing or not valid.
        """
        result: dict[str, object]
        if "=" in text:
            result = dict(part.partition("=")[::2] for part in text.split(","))
        else:
            result, own = _read(Path(text))
            currency = currency or own
        hosts = tuple((name.strip(), _price(name, value)) for name, value in result.items())
        if not currency:
            raise FlatoutError(
                f"expected the currency of the prices, found none (--price {text})",
                do=f'say it: {_EXAMPLE}, or currency = "USD" in the file',
            )
        if not is_currency(currency):
            raise FlatoutError(
                "expected a currency by its code of three capital letters, such as USD or EUR; "
                f"found {currency!r}"
            )
        return cls(hosts, currency)


def _read(path: Path) -> tuple[dict[str, object], str | None]:
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FlatoutError(
            f"cannot read prices: {error.strerror}", where=str(path), do=f"such as {_EXAMPLE}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FlatoutError(
            f"expected TOML, found something else ({error})", where=str(path)
        ) from error
    prices, currency = data.get("prices"), data.get("currency")
    if not isinstance(prices, dict) or not prices:
        raise FlatoutError(
            "expected a table of prices, found none",
            where=str(path),
            do='write currency = "USD", and below [prices] such as "c5.4xlarge" = 0.68',
        )
    return prices, currency if isinstance(currency, str) else None


def _price(name: str, value: object) -> float:
    try:
        price = float(str(value).strip())
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf") or not name.strip():
        raise FlatoutError(
            f"expected a price per hour of a host, found {name}={value}", do=f"such as {_EXAMPLE}"
        )
    return price
