"""The network between hosts: measured and stored as JSON, or given as a link's rate.

Network.read("network.json").links[0].bytes_per_s
parse_rate("10Gb")      # 1.25e9 bytes per second
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flatout.atomic_file import atomic_write
from flatout.errors import FlatoutError

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
_BITS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(b|bit|bps|bit/s|b/s|B|B/s)")
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(us|ms|s|min|m|h|d)")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(_Part):
    """The link between two hosts: medians of the round trip and of one sender's rate."""

    between: tuple[str, str]
    rtt_s: _Positive
    bytes_per_s: _Positive


class Collective(_Part):
    """The times of a collective operation.

    Attributes:
        op: the operation, such as "all_reduce".
        reduction: name as in the setting `world.reduction`; None where the operation is no
            reduction.
        ranks, hosts: number of ranks and of hosts; each host has equally many ranks.
        seconds: seconds of the slowest rank, for each repetition of the operation.
    """

    op: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
    reduction: str | None = None
    ranks: _Count
    hosts: _Count
    bytes: _Positive
    seconds: Annotated[list[_Positive], Field(min_length=1)]


class Network(_Part):
    """The measured network between hosts, `network.json`.

    Attributes:
        version: the version of the file's schema; the file calls it "schema".
        hosts: names of the hosts.
        links: measured links between some or all pairs of hosts.
        collectives: measured operations among some or all hosts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True)

    version: Literal[1] = Field(1, alias="schema")
    hosts: Annotated[list[str], Field(min_length=1)]
    links: list[Link] = []
    collectives: list[Collective] = []

    @model_validator(mode="after")
    def _check(self) -> Network:
        for link in self.links:
            for name in link.between:
                if name not in self.hosts:
                    raise ValueError(f"a link names {name!r}, which is not among the hosts")
        if not self.links and not self.collectives:
            raise ValueError("neither links nor collectives were measured")
        return self

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Network:
        """Read the file.

        Raises:
            FlatoutError: the file is missing, or holds no network.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise FlatoutError(
                f"cannot read network figures: {error.strerror}",
                where=str(path),
                do="measure them, or give a line rate such as --network 10Gb",
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"]))
            raise FlatoutError(
                f"expected network figures, found something else ({at}: {first['msg']})",
                where=str(path),
                do="measure them again, or give a line rate such as --network 10Gb",
            ) from error

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically."""
        with atomic_write(Path(path)) as file:
            file.write(json.dumps(self.model_dump(by_alias=True), indent=1) + "\n")


def parse_rate(text: str) -> float:
    """Return bytes per second: "10Gb" and "100 Mbit/s" count bits, "50MB" and "1GB/s" bytes."""
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise FlatoutError(
            f"expected a rate such as 10Gb (bits) or 100MB (bytes) per second, found {text!r}"
        )
    return float(match[1]) * _BITS[match[2]] / (1 if match[3].startswith("B") else 8)


def parse_seconds(text: str) -> float:
    """Return the seconds of a time such as "0.2ms", "50us", "30min" or "2h"."""
    match = _TIME.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise FlatoutError(f"expected a time such as 0.2ms, 30min or 2h, found {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def parse_network(text: str) -> Network | float:
    """Return the rate of a network, or a measured network from its file."""
    if _RATE.fullmatch(text.strip()):
        return parse_rate(text)
    return Network.read(text)
