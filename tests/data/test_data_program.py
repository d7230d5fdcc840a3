"""Batches made several at a time are those made one by one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout
from flatout.data.execution.program import _ends


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.svm"
    rng = np.random.default_rng(0)
    lines = []
    for row in range(400):
        ids = np.sort(rng.choice(90, rng.integers(0, 7), replace=False)) + 1
        lines.append(" ".join([str(row % 3), *(f"{i}:{rng.random():.3f}" for i in ids)]))
    path.write_text("\n".join(lines) + "\n")
    return path


def in_runs(pipeline):
    """Have batches made several at a time, as if the first ones had not been quick."""
    pipeline._program.quick = False
    return pipeline


def flat(batches):
    return [
        [batch.targets, batch.indices, batch.weight, *batch.inputs.values()] for batch in batches
    ]


def same(found, expected):
    found, expected = flat(found), flat(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    size=st.integers(1, 40),
    threads=st.integers(1, 3),
    start=st.integers(0, 9),
    last=st.sampled_from(["keep", "drop", "pad"]),
    world=st.integers(1, 3),
    layout=st.sampled_from(["fixed", "ragged"]),
)
def test_several_at_a_time_are_the_same(text, size, threads, start, last, world, layout):
    def batches(depth):
        data = flatout.data.libsvm(text, layout=layout).shuffle(seed=3).batch(size, last=last)
        data = data.shard(world - 1, world).map(twice)
        return list(in_runs(data.options(threads=threads, depth=depth)).batches(1, start))

    same(batches(None), batches(4))  # a depth that was asked for: one by one


def twice(inputs, targets):
    return {name: 2 * values for name, values in inputs.items()}, targets


def test_several_are_made_at_a_time(text):
    data = in_runs(flatout.data.libsvm(text).batch(2).options(threads=1))
    found = list(data.batches(0))
    steps = np.diff([batch.targets.data_ptr() for batch in found])
    assert np.mean(steps == 2 * 8) > 0.5, "their rows lie side by side in memory"


def test_an_error_comes_with_its_batch():
    def check(inputs, targets):
        if 77 in inputs:
            raise ValueError("seventy-seven")
        return inputs, targets

    x = np.arange(120, dtype=np.int64)
    for after in (False, True):
        data = flatout.data.arrays(x, x)
        data = data.batch(2).map(check) if after else data.map(check_one).batch(2)
        seen = []
        batches = in_runs(data.options(threads=2)).batches(0)
        with pytest.raises(ValueError, match="seventy-seven"):
            seen.extend(number for batch in batches for number in batch.inputs.tolist())
        assert seen == list(range(76))


def check_one(x, y):
    if x == 77:
        raise ValueError("seventy-seven")
    return x, y


def test_a_batch_with_rows_left_out_is_its_own(tmp_path):
    images = pytest.importorskip("PIL.Image")
    folder = Path(tmp_path) / "photos" / "one"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    for number in range(60):
        path = folder / f"{number:02}.png"
        images.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(path)
    whole = (folder / "37.png").read_bytes()
    (folder / "37.png").write_bytes(whole[:200] + bytes(len(whole) - 200))  # its header is whole
    data = flatout.data.images(tmp_path / "photos", on_error="skip").batch(3).options(threads=1)
    rows = [batch.indices.tolist() for batch in in_runs(data).batches(0)]
    assert rows == [
        [row for row in range(first, first + 3) if row != 37] for first in range(0, 60, 3)
    ]
    assert "37.png" in str(data.notes())
    assert "1 " in str(data.notes())


def test_where_each_batch_ends():
    asked = [np.array([5, 1]), np.array([9, 2]), np.array([7])]
    assert _ends(np.array([5, 1, 9, 2, 7]), asked) == [2, 4, 5]
    assert _ends(np.array([1, 9, 2]), asked) == [1, 3, 3]
    assert _ends(np.array([5, 2, 7]), asked) == [1, 2, 3]
    assert _ends(np.array([], np.int64), asked) == [0, 0, 0]


def test_rows_that_fill_up_a_batch_cannot_be_told_after_a_function_left_some_out():
    x = np.arange(10, dtype=np.int64)

    def without_nine(inputs, targets):
        return inputs[inputs != 9], targets[inputs != 9]

    data = flatout.data.arrays(x, x).batch(4, last="pad").map(without_nine)
    with pytest.raises(flatout.errors.DataError, match="a function made 2 rows of 4"):
        list(data.batches(0))
