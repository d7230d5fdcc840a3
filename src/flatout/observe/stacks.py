"""Stack samples: the user's lines in each sample, and the library code that these lines called."""

from __future__ import annotations

import gc
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import CodeType, FunctionType
from typing import TypeAlias

from flatout.observe.lanes import AFTER, HOST
from flatout.observe.sites import is_users

# Packages that call the user's code. Their own time is attributed to their functions.
TRAINERS = ("lightning", "pytorch_lightning", "accelerate", "transformers", "keras")
_LOADING = "/torch/utils/data/"
# Maximum number of characters of the source text of a call.
_LONGEST_WORDS = 40

Places: TypeAlias = tuple[tuple[str, int], ...]
"""File and line number of each line."""


@dataclass(frozen=True)
class Place:
    """A position in the code: a code object and one of its instructions."""

    code: CodeType
    instruction: int

    @property
    def is_users(self) -> bool:
        return is_users(self.code.co_filename)

    @property
    def line(self) -> int:
        """Line number, from 1."""
        return _position(self.code, self.instruction)[0] or self.code.co_firstlineno

    @property
    def site(self) -> tuple[str, int]:
        """File and line."""
        return self.code.co_filename, self.line

    @property
    def package(self) -> str:
        """Top-level package of the code; "" for code that is not installed."""
        _, _, inside = self.code.co_filename.replace("\\", "/").rpartition("-packages/")
        return inside.partition("/")[0].removesuffix(".py")

    def words(self) -> str:
        """Return the source text of the current call, without its arguments."""
        line, end_line, column, end = _position(self.code, self.instruction)
        text = linecache.getline(self.code.co_filename, line or 0)
        if line is None or column is None or end is None or not text:
            return ""
        raw = text.encode()
        part = raw[column : end if end_line == line else None].decode(errors="replace")
        return _without_arguments(part)


def _without_arguments(text: str) -> str:
    text = text.strip()
    loop = re.fullmatch(r"for .+? in (.+):", text)
    if loop:
        return loop[1]
    if text.endswith(")"):
        depth = 0
        for position in range(len(text) - 1, -1, -1):
            depth += (text[position] == ")") - (text[position] == "(")
            if depth == 0:
                text = text[:position]
                break
    else:
        text = _before_open_bracket(text)
    return text if len(text) <= _LONGEST_WORDS else text[: _LONGEST_WORDS - 3] + "..."


def _before_open_bracket(text: str) -> str:
    is_open: list[int] = []
    for position, letter in enumerate(text):
        if letter == "(":
            is_open.append(position)
        elif letter == ")" and is_open:
            is_open.pop()
    return text[: is_open[0]] if is_open else text


@cache
def _position(code: CodeType, instruction: int) -> tuple[int | None, ...]:
    return next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)


@dataclass
class Stack:
    """Samples with the same stack.

    Attributes:
        line: innermost Place in the user's code.
        users: the user's lines, innermost first.
        within: description of the library code that `line` called; "" for none.
        trainer: package of the training framework that ran below that line; "" for none.
        samples: number of stack samples.
        ns: nanoseconds by lane.
        bins: nanoseconds by bin of successive steps.
    """

    line: Place
    users: Places
    within: str
    trainer: str
    samples: int
    ns: list[float]
    bins: list[float]


def codes(others: Iterable[CodeType] = ()) -> dict[int, CodeType]:
    """Return the code objects of all live functions, and of `others`, by id."""
    result: dict[int, CodeType] = {}
    todo = [item.__code__ for item in gc.get_objects() if type(item) is FunctionType]
    todo += others
    while todo:
        code = todo.pop()
        if id(code) not in result:
            result[id(code)] = code
            todo += [constant for constant in code.co_consts if type(constant) is CodeType]
    return result


def stacks_in(
    nodes: list[tuple[int, int, int, int, list[float], list[float]]],
    known: dict[int, CodeType],
) -> Iterator[Stack]:
    """Yield the stacks of a tree of places."""
    for number, node in enumerate(nodes):
        if not node[3]:
            continue
        places = []
        while number >= 0:
            number, code_id, instruction = nodes[number][:3]
            code = known.get(code_id)
            if code is not None and instruction < len(code.co_code):
                places.append(Place(code, max(0, instruction)))
        yield _stack(places, *node[3:])


NOWHERE = Place(compile("", "<nowhere>", "exec"), 0)
"""Place of a stack without a line of the user's."""


def _is_module(place: Place) -> bool:
    names = ("call",) if place.package == "keras" else ("forward",)
    return place.code.co_name in names


def _stack(
    places: list[Place],
    samples: int,
    ns: list[float],
    bins: list[float],
) -> Stack:
    depth = next((depth for depth, place in enumerate(places) if place.is_users), len(places))
    libraries = places[:depth]
    users = [place for place in places[depth:] if place.is_users]
    moved = list(ns)
    moved[HOST] += moved[AFTER]
    moved[AFTER] = 0.0
    trainer = next((place for place in libraries if place.package in TRAINERS), None)
    module = next(filter(_is_module, libraries), None)
    loader = next((place for place in libraries if _LOADING in place.code.co_filename), None)
    named = module or trainer or loader
    within = "" if named is None else named.code.co_qualname.replace("<locals>.", "")
    return Stack(
        users[0] if users else NOWHERE,
        tuple(dict.fromkeys(place.site for place in users)),
        within.removesuffix(".forward").removesuffix(".call"),
        "" if trainer is None else trainer.package,
        samples,
        moved,
        bins,
    )
