"""Calls that a library makes for the user: whose line they are, which is not always looked for."""

import numpy as np

from flatout.observe.calls import Calls
from flatout.observe.lanes import Lanes
from flatout.observe.sites import read

# As if it were a part of numpy.
NAMES = {}
exec(compile("def library(note): note()", f"{np.__file__}.py", "exec"), NAMES)
library = NAMES["library"]


def told(calls):
    return {read(call.site).code: call.count for call in calls.all()}


def test_a_line_that_stays_the_same_is_looked_for_less_often():
    calls = Calls(Lanes())

    def note():
        calls.note("item", 5, 2)

    for _ in range(500):
        library(note)  # the only line
    assert told(calls) == {"library(note)  # the only line": 500}
    assert calls.noted == 500
    assert 101 <= calls.sought < 150


def test_lines_that_take_turns_are_told_apart():
    calls = Calls(Lanes())

    def note():
        calls.note("item", 5, 2)

    for _ in range(300):
        library(note)  # first
        library(note)  # second
    assert told(calls) == {"library(note)  # first": 300, "library(note)  # second": 300}
    assert calls.sought == 600


def test_another_line_is_noticed_soon():
    calls = Calls(Lanes())

    def note():
        calls.note("item", 5, 2)

    for _ in range(300):
        library(note)  # first
    for _ in range(300):
        library(note)  # second
    found = told(calls)
    assert sum(found.values()) == 600
    assert 300 <= found["library(note)  # first"] < 316


def test_what_the_loop_itself_prints_is_looked_for_once():
    calls = Calls(Lanes())

    def tell():
        calls.note("print", 5, 1)

    def train():
        for _ in range(40):
            tell()  # by a function of the loop's
            calls.note("print", 5, 1)  # in the loop

    calls.loops.add(train.__code__)
    train()
    assert told(calls) == {
        "tell()  # by a function of the loop's": 40,
        'calls.note("print", 5, 1)  # in the loop': 40,
    }
    assert calls.sought == 40 + 1
