"""How many lines a first look takes on a screen, of what the doctor's JSON says of it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from flatout.devices import inventory
from flatout.doctor import Verdict
from flatout.recipe import Parity
from flatout.report.consent import provable
from flatout.report.first_look import FirstLookReport
from flatout.terminal import Console

# Columns of the screens.
WIDTHS = (80, 100)


def lines_on_screens(said: Mapping[str, Any]) -> list[int]:
    """Count them at each of WIDTHS, as a user sees them who lets the doctor try nothing."""
    verdict = _verdict().validate_python(said)
    report = FirstLookReport(
        verdict,
        inventory(),
        said["seconds"],
        said["command"],
        cures=len(provable(verdict, Parity.TOLERANT)),
        held=said["held"],
        lacks=said["lacks"],
    )
    return [len(screen(report, width).splitlines()) for width in WIDTHS]


def screen(report: FirstLookReport, width: int) -> str:
    """What a terminal of so many columns shows, which breaks lines that are longer."""
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(report, crop=False)
    lines = console.file.getvalue().splitlines()
    return "\n".join(
        line[start : start + width]
        for line in lines
        for start in range(0, max(1, len(line)), width)
    )


@cache
def _verdict() -> TypeAdapter[Verdict]:
    return TypeAdapter(Verdict)
