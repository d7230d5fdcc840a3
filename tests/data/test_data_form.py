import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.batches.form import Leaf, columns_of, form_of
from flatout.data.reading.block import Block, Ragged, join, offsets_of, rows_of, take
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.schema import Column, Schema
from flatout.errors import DataError


def ragged(rows):
    values = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return Ragged(values, offsets_of([len(row) for row in rows]))


def rows(values):
    return [
        values.values[a:b].tolist()
        for a, b in zip(values.offsets, values.offsets[1:], strict=False)
    ]


ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=8)


@given(ROWS, st.data())
def test_ragged_rows_are_taken_and_joined_as_lists_are(given_rows, data):
    index = data.draw(st.lists(st.integers(0, len(given_rows) - 1), max_size=10))
    block = Block({"x": ragged(given_rows)}, np.arange(len(given_rows)))
    taken = take(block, np.asarray(index, np.int64))
    assert rows(taken.columns["x"]) == [given_rows[i] for i in index]
    assert taken.numbers.tolist() == index
    both = join([block, taken])
    assert rows(both.columns["x"]) == given_rows + [given_rows[i] for i in index]
    assert rows_of(both.columns["x"]) == len(both) == len(given_rows) + len(index)


@given(ROWS)
def test_ragged_rows_are_padded_to_the_longest(given_rows):
    schema = Schema(
        format="x", columns=(Column(name="x", dtype="int64", ragged=True, pad=7, lengths="n"),)
    )
    block = Block({"x": ragged(given_rows)}, np.arange(len(given_rows)))
    batch = form_of(schema).batch(block, Buffers())
    width = max(1, *map(len, given_rows))
    assert batch.inputs["x"].tolist() == [r + [7] * (width - len(r)) for r in given_rows]
    assert batch.inputs["n"].tolist() == list(map(len, given_rows))


def test_roles_decide_what_goes_where():
    columns = [
        Column(name="a", dtype="float32", shape=(2,)),
        Column(name="y", dtype="int64", role="target"),
        Column(name="w", dtype="float32", role="weight"),
        Column(name="z", dtype="int64", role="unused"),
    ]
    block = Block(
        {
            "a": np.ones((3, 2), np.float32),
            "y": np.arange(3),
            "w": np.ones(3, np.float32),
            "z": np.arange(3),
        },
        np.arange(3),
    )
    batch = form_of(Schema(format="x", columns=tuple(columns))).batch(block, Buffers())
    assert batch.inputs.shape == (3, 2)
    assert batch.targets.tolist() == [0, 1, 2]
    assert batch.weight.tolist() == [1, 1, 1]
    columns.append(Column(name="b", dtype="float32"))
    assert list(form_of(Schema(format="x", columns=tuple(columns))).inputs) == ["a", "b"]
    with pytest.raises(DataError, match="no column has the role input: the columns are y"):
        form_of(Schema(format="x", columns=(columns[1],)))
    twice = (columns[0], columns[2], Column(name="v", dtype="float32", role="weight"))
    with pytest.raises(DataError, match="at most one column in the role weight, found w, v"):
        form_of(Schema(format="x", columns=twice))


def test_functions_may_give_any_structure():
    made = [({"a": torch.ones(2) * i, "b": (i, 0.5)}, np.int64(i)) for i in range(3)]
    columns, form = columns_of(made, "f")
    assert form.inputs == {
        "a": Leaf("inputs['a']"),
        "b": (Leaf("inputs['b'][0]"), Leaf("inputs['b'][1]")),
    }
    batch = form.batch(Block(columns, np.arange(3)), Buffers())
    assert batch.inputs["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch.inputs["b"][0].dtype == torch.int64
    assert batch.inputs["b"][1].dtype == torch.float32
    assert form.sample(Block(columns, np.arange(3)), 2)[1].item() == 2


def test_vectors_of_different_lengths_become_ragged():
    columns, form = columns_of([torch.ones(2), torch.ones(3)], "f")
    batch = form.batch(Block(columns, np.arange(2)), Buffers())
    assert batch.inputs.tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([(1, 2), (1, None)], "targets"),
        ([{"a": 1}, {"b": 1}], "differ in structure: expected 'a', as in the first one; found 'b'"),
        ([{"a": 1}, 1], "expected 'a', .*; found int"),
        ([([1, 2], 0), ([1], 0)], "expected 2 parts, .*; found 1 parts"),
        ([(torch.ones(2, 2),), (torch.ones(2, 3),)], r"shapes \(2, 2\) and \(2, 3\)"),
        ([torch.ones(2), torch.ones(2, dtype=torch.float64)], "dtypes float32 and float64"),
        (["a", "b"], "found str"),
        ([(1, 2, 3, 4)], "found 4 parts"),
        ([torch.ones(2, dtype=torch.bfloat16)], "found bfloat16"),
    ],
)
def test_samples_that_do_not_fit_together_are_named(made, words):
    with pytest.raises(DataError, match=words):
        columns_of(made, "f")


def test_buffers_are_used_again_only_when_nothing_holds_them():
    buffers = Buffers()
    first = buffers.empty((256, 256), np.float32)
    first[:] = 7  # what lay there may be NaN, which equals nothing
    place = first.ctypes.data
    tensor = torch.from_numpy(first)
    del first
    view = tensor[3:5]
    del tensor
    other = buffers.empty((256, 256), np.float32)
    assert other.ctypes.data != place
    kept = view.clone()
    other[:] = 1
    assert torch.equal(view, kept)
    del view
    assert buffers.empty((250, 256), np.int32).ctypes.data == place
    small = buffers.empty(3, np.int64)
    assert small.shape == (3,)
