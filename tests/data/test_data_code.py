"""A digest of a user's code: other for another function, the same where a script runs again."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from flatout.data.digests.code import arguments_of, code_digest


def made(source: str, name: str = "f"):
    """What a script of the user's defines."""
    found: dict = {"__name__": "users_script"}
    exec(source, found)
    return found[name]


KLASS = """
class f:
    def __init__(self, size=1, fingerprint="a"):
        self.size, self._fingerprint, self.calls = size, fingerprint, 0
    def __call__(self, x):
        return self.helped(x)
    def helped(self, x):
        return x {operator} self.size
    def shown(self):
        return {shown}
"""


def klass(operator="+", shown="1", **options):
    return made(KLASS.format(operator=operator, shown=shown))(**options)


def counted():
    one = klass()
    one.calls += 1
    return one


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (made("f = lambda x: x + 1"), made("f = lambda x: x + 2"), False),
        (made("f = lambda x: x + 1"), made("# said\nf = lambda x: x +  1"), True),
        (made("K = 1\ndef f(x): return x * K"), made("K = 2\ndef f(x): return x * K"), False),
        (
            made("def g(x): return x\ndef f(x): return g(x)"),
            made("def g(x): return -x\ndef f(x): return g(x)"),
            False,
        ),
        (functools.partial(np.add, 1), functools.partial(np.add, 2), False),
        (functools.partial(open, "/a/b"), functools.partial(open, "/c/d"), True),
        (klass(), klass("-"), False),
        (klass(), klass(shown="2"), True),
        (klass(), klass(size=2), False),
        (klass(), klass(fingerprint="b"), True),
        (klass(), counted(), True),
        (np.arange(4), np.arange(1, 5), False),
    ],
)
def test_what_is_another_function(one, other, same):
    assert (code_digest(one) == code_digest(other)) == same


def test_arguments_are_attributes_named_like_the_constructors():
    assert arguments_of(klass(size=3)) == {"size": 3, "fingerprint": "a"}
    assert arguments_of(object()) == {}


def test_what_holds_itself_ends():
    one = klass()
    one.size = [one]
    assert len(code_digest(one)) == 16
