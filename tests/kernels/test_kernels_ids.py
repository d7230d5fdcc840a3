"""Numbers of ids: as a dict counts them, and wrong calls are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.kernels import ids as kernel
from flatout.kernels.ids import IdNumbers, hash_ids

EDGES = [0, 1, -1, 2**63 - 1, -(2**63), 2**31, 2**32]


def _ids(seed, rows, width, distinct):
    draw = np.random.default_rng(seed)
    pool = np.concatenate([draw.integers(-(2**63), 2**63 - 1, distinct), EDGES])
    return draw.choice(pool, (rows, width))


@pytest.mark.parametrize("width", [1, 3])
def test_as_a_dict(width):
    fields = np.array([0, 5, 2**15 - 1])[:width]
    numbers, expected = IdNumbers(), {}
    for seed in range(3):  # grows beyond its first slots
        ids = _ids(seed, 700, width, 900)
        numbers.add(ids, fields)
        for row in ids.tolist():
            for field, one in zip(fields.tolist(), row, strict=True):
                expected[field, one] = expected.get((field, one), 0) + 1
    found = numbers.items()
    assert numbers.count == len(expected)
    pairs = list(zip(found.fields.tolist(), found.ids.tolist(), strict=True))
    assert dict(zip(pairs, found.numbers.tolist(), strict=True)) == expected
    assert pairs == sorted(expected)

    wanted = _ids(9, 50, width, 10)
    wanted[::2] = _ids(2, 700, width, 900)[:25]
    firsts, buckets = np.array([3, 50, 70])[:width], np.array([7, 1, 10**6])[:width]
    rows = np.empty_like(wanted)
    assert numbers.rows(wanted, fields, firsts, buckets, rows) == -1
    for place, one in np.ndenumerate(wanted):
        field = int(fields[place[1]])
        hashed = int(hash_ids(np.array([one]), field)[0] % np.uint64(buckets[place[1]]))
        other = int(firsts[place[1]]) + hashed
        known = expected.get((field, int(one)))
        assert rows[place] == (other if known is None else known - 1)

    none = np.zeros(width, np.int64)
    bad = numbers.rows(wanted, fields, firsts, none, rows)
    known = [(int(fields[p[1]]), int(one)) in expected for p, one in np.ndenumerate(wanted)]
    assert bad == known.index(False)
    assert rows.reshape(-1)[bad] == 0


def test_the_hash_is_splitmix64():
    # The first outputs of the generator for seed 0 (Vigna's splitmix64.c): its states are multiples
    # of the increment, as ids of 0 in fields 0 and 1 are.
    assert hash_ids(np.array([0]), 0)[0] == 0xE220A8397B1DCDAF
    assert hash_ids(np.array([0]), 1)[0] == 0x6E789E6AA1B965F4


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(1, 9)), max_size=60))
def test_numbers_are_added_up(given):
    ids = np.array([one for one, _ in given], np.int64)
    numbers = np.array([number for _, number in given], np.int64)
    held, expected = IdNumbers(), {}
    held.add(ids, np.array([4]), numbers)
    for one, number in given:
        expected[one] = expected.get(one, 0) + number
    found = held.items()
    assert dict(zip(found.ids.tolist(), found.numbers.tolist(), strict=True)) == expected
    assert set(found.fields.tolist()) <= {4}


@pytest.mark.parametrize(
    ("ids", "fields"),
    [
        (np.zeros(3, np.int32), np.zeros(1, np.int64)),
        (np.zeros(3), np.zeros(1, np.int64)),
        (np.zeros((4, 2), np.int64)[::2], np.zeros(2, np.int64)),
        (np.zeros(3, np.int64), np.array([2**15])),
        (np.zeros(3, np.int64), np.array([-1])),
        (np.zeros(3, np.int64), np.zeros(0, np.int64)),
    ],
)
def test_refusals(ids, fields):
    with pytest.raises(ValueError, match=r"expected|field"):
        IdNumbers().add(ids, fields)


def test_the_extension_checks_for_itself():
    slots, ids, one = np.zeros((4, 2), np.int64), np.arange(9), np.zeros(1, np.int64)
    assert kernel._c.add(slots, ids, one, None, 0, 0) == (2, 2)  # half of the slots are used
    for bad in (np.zeros((3, 2), np.int64), np.zeros((4, 2)), np.zeros((0, 2), np.int64)):
        with pytest.raises(ValueError, match="power of two"):
            kernel._c.add(bad, ids, one, None, 0, 0)
    with pytest.raises(ValueError, match="places from 0"):
        kernel._c.add(slots, ids, one, None, -1, 0)
    with pytest.raises(ValueError, match="field 40000"):
        kernel._c.rows(slots, ids, np.array([40000]), one, one, ids.copy())
    with pytest.raises(ValueError, match="as fields and ids"):
        kernel._c.rows(slots, ids, one, one, one, np.zeros(3, np.int64))
    full = np.ones((4, 2), np.int64)  # no slot is free, and none holds the id
    out = np.empty(9, np.int64)
    assert kernel._c.rows(full, ids + 7, one, one, one, out) == 0
    assert kernel._c.add(full, ids + 7, one, None, 0, 4) == (0, 4)
