"""What makes no sense is refused at once, in words, and costs nothing else."""

import numpy as np
import pytest

import flatout
from flatout.errors import DataError

X = np.random.default_rng(0).random((100, 3), np.float32)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d.libsvm(""), "expected a path, found ''"),
        (lambda d: d.libsvm(None), "path or a list of paths, found NoneType"),
        (lambda d: d.libsvm([3]), "expected a path, found 3"),
        (lambda d: d.arrays(X).prefetch("gpu"), "such as 'cuda'"),
        (lambda d: d.arrays(X).shuffle("x"), "an int as seed, found 'x'"),
        (lambda d: d.arrays(X).batch(2).options(threads="2"), "threads is an int"),
        (lambda d: d.arrays(X).repeat(0), "repeat: times: expected an int of at least 1, found 0"),
        (lambda d: d.arrays(X).split("half"), "between 0 and 1, found 'half'"),
        (lambda d: d.arrays(X).map(lambda x: None).batch(2).peek(1), "gives None"),
        (
            lambda d: d.arrays(X, X[:, 0]).split(0.5, stratify=True)[0].batch(2).peek(1),
            "100 different targets in 100 samples",
        ),
        (
            lambda d: d.mix(d.arrays(X), d.arrays(X, X[:, 0])).batch(2).peek(1),
            "inputs inputs: float32 of shape .3,.; and inputs inputs, targets targets",
        ),
    ],
)
def test_refusals(make, words):
    with pytest.raises(DataError, match=words):
        make(flatout.data)


def test_classes_may_be_floats():
    labels = np.arange(100, dtype=np.float32) % 3
    first, _ = flatout.data.arrays(X, labels).split(0.5, stratify=True)
    assert len(list(first.batch(10).batches(0))) == 5


def test_a_file_without_rows(tmp_path):
    empty = tmp_path / "empty.svm"
    empty.write_text("")
    with pytest.raises(DataError, match=r"no rows(.|\n)*empty\.svm"):
        flatout.data.libsvm(empty)
    bad = tmp_path / "bad.svm"
    bad.write_text("abc\nx 1\n")
    with pytest.raises(DataError, match=r"no rows(.|\n)*bad\.svm"):
        flatout.data.libsvm(bad, on_error="skip")


def test_a_schema_of_another_format(tmp_path):
    schema = {"format": "libsvm", "columns": [{"name": "x", "dtype": "float32", "role": "input"}]}
    with pytest.raises(DataError, match="expected a schema of images, found one of libsvm"):
        flatout.data.images(tmp_path, size=9, schema=schema)


def test_a_schema_that_cannot_be_written(tmp_path):
    (tmp_path / "rows.svm").write_text("1 1:2\n0 1:3\n")
    data = flatout.data.libsvm(tmp_path / "rows.svm")
    with pytest.raises(DataError, match="cannot be written: Is a directory"):
        data.schema.dump(tmp_path)


def test_arrays_may_be_mixed():
    mixed = flatout.data.mix(flatout.data.arrays(X), flatout.data.arrays(X + 1)).batch(20)
    rows = np.concatenate([batch.inputs.numpy() for batch in mixed.batches(0)])
    assert sorted(rows[:, 0]) == sorted([*X[:, 0], *(X[:, 0] + 1)])


def test_short_runs_are_explained():
    """Fewer batches than a window of the tuner has, but enough to tell."""

    def slowly(x):
        return x + sum(range(20_000)) * 0

    data = flatout.data.arrays(X).map(slowly).batch(5).options(threads=1)
    for epoch in range(3):
        list(data.batches(epoch))
    assert data.explanation().waited is not None
    assert "bound by INPUT" in str(data.explanation())


def test_arrays_are_explained_as_they_run():
    data = flatout.data.arrays(X).batch(5)
    list(data.batches(0))
    assert "in the thread that asks" in str(data.explanation())
