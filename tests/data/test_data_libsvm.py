import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

import flatout
from flatout.errors import DataError

AGARICUS = Path(__file__).parents[3] / "shared" / "data" / "agaricus" / "agaricus_train.libsvm"


def write(folder, text, name="a.svm"):
    path = folder / name
    path.write_text(text)
    return path


def whole(pipeline):
    (batch,) = pipeline.batch(pipeline.batch(1).samples).batches(0)
    return batch


def test_few_features_come_dense(tmp_path):
    path = write(tmp_path, "1 1:0.5 3:2\n# a comment\n0 2:-1e-2  # another\n\n2 1:7\r\n")
    batch = whole(flatout.data.libsvm(path))
    assert batch.inputs.tolist() == [[0.5, 0, 2], [0, np.float32(-0.01), 0], [7, 0, 0]]
    assert batch.targets.tolist() == [1, 0, 2]
    assert batch.targets.dtype == torch.int64


def test_labels_that_are_no_classes_are_floats(tmp_path):
    batch = whole(flatout.data.libsvm(write(tmp_path, "-1 1:1\n+1 1:2\n")))
    assert batch.targets.tolist() == [-1, 1]
    assert batch.targets.dtype == torch.float32


def test_indices_from_zero(tmp_path):
    data = flatout.data.libsvm(write(tmp_path, "1 0:1 2:2\n0 1:5\n"))
    assert data.schema.options == {"base": 0, "features": 3}
    assert whole(data).inputs.tolist() == [[1, 0, 2], [0, 5, 0]]
    shifted = flatout.data.libsvm(write(tmp_path, "1 1:1 2:2\n"), base=0)
    assert whole(shifted).inputs.tolist() == [[0, 1, 2]]


def test_many_features_come_as_ids_and_values(tmp_path):
    fixed = whole(flatout.data.libsvm(write(tmp_path, "1 5:1 90000:2\n0 7:3 8:4\n")))
    assert fixed.inputs["ids"].tolist() == [[4, 89999], [6, 7]]
    assert fixed.inputs["values"].tolist() == [[1, 2], [3, 4]]
    path = write(tmp_path, "1 5:1 90000:2\n0 7:3\n1\n", "b.svm")
    ragged = whole(flatout.data.libsvm(path))
    assert ragged.inputs["ids"].tolist() == [[4, 89999], [6, 0], [0, 0]]
    assert ragged.inputs["values"].tolist() == [[1, 2], [3, 0], [0, 0]]
    padded = flatout.data.libsvm(path, layout="fixed")
    assert whole(padded).inputs["ids"].shape == (3, 2)
    assert padded.schema["ids"].shape == (2,)


def test_query_ids_are_a_column(tmp_path):
    data = flatout.data.libsvm(write(tmp_path, "1 qid:7 1:1\n0 qid:8 1:2\n"))
    assert data.schema["qid"].role == "unused"
    used = flatout.data.libsvm(
        tmp_path / "a.svm", schema=data.schema.with_roles(qid="input", features="input")
    )
    assert whole(used).inputs["qid"].tolist() == [7, 8]


@pytest.mark.parametrize("zero_based", [True, False])
def test_rows_are_those_of_scikit_learn(tmp_path, zero_based):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 30)) * (draw.random((80, 30)) < 0.3)
    x[0, 0] = x[1, 29] = 1.25
    path = tmp_path / "a.svm"
    dump_svmlight_file(x, draw.integers(0, 4, 80), str(path), zero_based=zero_based)
    batch = whole(flatout.data.libsvm(path))
    theirs, labels = load_svmlight_file(str(path), zero_based=zero_based)
    assert (batch.inputs.numpy() == theirs.toarray().astype(np.float32)).all()
    assert (batch.targets.numpy() == labels).all()


def test_several_files_packed_and_not(tmp_path):
    write(tmp_path, "1 1:1\n" * 3)
    (tmp_path / "b.svm.gz").write_bytes(gzip.compress(b"0 2:1\n" * 2))
    data = flatout.data.libsvm(tmp_path / "*.svm*")
    assert whole(data).targets.tolist() == [1, 1, 1, 0, 0]
    assert data.describe() == "2 LibSVM files, 30 bytes, 5 rows, in the given order"


def test_one_schema_serves_training_and_test_data(tmp_path):
    train = flatout.data.libsvm(write(tmp_path, "1 1:1 9:1\n"))
    test = flatout.data.libsvm(write(tmp_path, "0 3:1\n", "b.svm"), schema=train.schema)
    assert whole(test).inputs.shape == (1, 9)
    train.schema.dump(tmp_path / "schema.toml")
    again = flatout.data.libsvm(tmp_path / "b.svm", schema=tmp_path / "schema.toml")
    assert torch.equal(whole(again).inputs, whole(test).inputs)


@pytest.mark.parametrize("lacking", ["label", "ids", "values"])
def test_a_schema_that_lacks_a_column_names_those_it_has(tmp_path, lacking):
    path = write(tmp_path, "1 1:1 9:1\n")
    stated = flatout.data.libsvm(path, layout="fixed").schema.model_dump(
        mode="json", exclude_defaults=True
    )
    stated["columns"] = [one for one in stated["columns"] if one["name"] != lacking]
    left = ", ".join(sorted({"label", "ids", "values"} - {lacking}))
    with pytest.raises(DataError, match=f"both ids and values; the schema has {left}\n") as caught:
        flatout.data.libsvm(path, schema=stated)
    assert "flatout data inspect" in caught.value.do


@pytest.mark.parametrize(
    "bad",
    ["1 2:1 1:1", "1 x:1", "1 1:nan", "1:1 2:2", "1 1;1", "1 1:1e99", "1 12:1", "1 0:1", "a 1:1"],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, bad):
    good = "1 1:1 9:1\n"
    schema = flatout.data.libsvm(write(tmp_path, good)).schema
    path = write(tmp_path, f"{good}# comment\n{bad}\n{good}", "bad.svm")
    with pytest.raises(DataError, match=r"expected .* found") as caught:
        list(flatout.data.libsvm(path, schema=schema).batch(4).batches(0))
    assert "bad.svm:3 (byte " in caught.value.where
    assert "on_error" in caught.value.do


def test_bad_rows_are_skipped_and_counted(tmp_path):
    path = write(tmp_path, "1 1:1\n1 2:1 1:1\n0 2:1\nx\n")
    with pytest.raises(DataError, match="expected"):
        flatout.data.libsvm(path)
    data = flatout.data.libsvm(path, on_error="skip")
    assert whole(data).targets.tolist() == [1, 0]
    (note,) = [note for note in data.batch(1).notes() if "skipped" in note]
    assert note.startswith("2 bad rows skipped: ")
    assert "a.svm:2" in note
    assert "a.svm:4" in note
    with pytest.raises(DataError, match="max_errors is 1"):
        flatout.data.libsvm(path, on_error="skip", max_errors=1)


def test_lengths_bring_rows_together(tmp_path):
    draw = np.random.default_rng(0)
    rows = [
        "1 " + " ".join(f"{i}:1" for i in sorted(draw.choice(5000, n, replace=False) + 1))
        for n in draw.integers(1, 60, 400)
    ]
    data = flatout.data.libsvm(write(tmp_path, "\n".join(rows)), layout="ragged").shuffle(seed=1)
    plain = data.batch(16).explanation().padding
    grouped = data.batch(16, by_length=True).explanation().padding
    assert grouped < 0.1 < 0.3 < plain


@pytest.mark.skipif(not AGARICUS.exists(), reason="agaricus is absent: ../shared/data is not there")
def test_mushrooms():
    data = flatout.data.libsvm(AGARICUS)
    theirs, labels = load_svmlight_file(str(AGARICUS))
    batch = whole(data)
    assert batch.inputs.shape == (6513, theirs.shape[1])
    assert (batch.inputs.numpy() == theirs.toarray()).all()
    assert (batch.targets.numpy() == labels).all()


def test_a_row_without_a_needed_qid_is_an_error(tmp_path):
    path = tmp_path / "a.svm"
    path.write_text("1 qid:3 1:2\n0 1:1\n")
    data = flatout.data.libsvm(path)
    assert len(next(data.batch(2).batches(0)).targets) == 2  # rows may lack an unused column
    wanted = flatout.data.libsvm(path, schema=data.schema.with_roles(qid="input"))
    with pytest.raises(DataError, match="expected qid: and a whole number, found a row") as caught:
        list(wanted.batch(2).batches(0))
    assert f"{path}:2 (byte 12)" in caught.value.where
