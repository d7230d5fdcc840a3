import os
import pickle

import numpy as np
import pytest
from data_made_up import same

from flatout.data.pipeline import Pipeline
from flatout.data.reading import indexed
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.files import find
from flatout.data.reading.indexed import IndexedRows
from flatout.data.sources.records.criteo import CriteoDecoder, criteo_schema
from flatout.errors import DataError


def line(number, label=None):
    integers = "\t".join(str(number + i) if i % 3 else "" for i in range(13))
    categories = "\t".join(f"{number * 7 + i:08x}" if i % 5 else "" for i in range(26))
    return f"{number % 2 if label is None else label}\t{integers}\t{categories}\n"


@pytest.fixture
def days(tmp_path):
    """Three files of 40, 0 and 25 rows; one ends without a newline, one has blank lines."""
    (tmp_path / "a.tsv").write_text("".join(map(line, range(40))))
    (tmp_path / "b.tsv").write_text("\n\n")
    (tmp_path / "c.tsv").write_text("\n" + "".join(map(line, range(40, 65))).rstrip("\n"))
    return tmp_path


def rows_of(folder, *, budget=None, faults=None, pattern="*.tsv", **reading):
    decoder = CriteoDecoder(criteo_schema())
    return IndexedRows(
        find(folder / pattern),
        decoder,
        faults or ErrorPolicy(),
        "Criteo",
        budget=budget,
        reading=indexed.Reading(**reading),
    )


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("piece", [300, 1 << 20])
def test_rows_are_found_in_any_order(days, budget, piece):
    rows = rows_of(days, budget=budget, piece=piece)
    assert rows.rows == 65
    numbers = np.random.default_rng(0).permutation(65)
    block = rows.take(numbers, Buffers())
    assert block.columns["label"].tolist() == [n % 2 for n in numbers]
    assert block.columns["categories"][:, 1].tolist() == [n * 7 + 1 for n in numbers]
    assert block.columns["integers"][:, 0].tolist() == [0] * 65
    assert (block.numbers == numbers).all()


def test_held_and_read_batches_are_the_same(days):
    held, read = (
        Pipeline(rows_of(days, budget=budget)).shuffle(seed=1).batch(7) for budget in (None, 0)
    )
    assert all(map(same, held.batches(0), read.batches(0)))
    assert "stay on the disk" in "".join(read.notes())


def test_the_index_is_kept_and_made_again_for_other_bytes(days, monkeypatch):
    first = rows_of(days)
    digest = first.digest
    built = []
    real = indexed._build
    monkeypatch.setattr(indexed, "_build", lambda *args: built.append(1) or real(*args))
    assert (rows_of(days).index.starts == first.index.starts).all()
    assert not built
    before = os.stat(days / "a.tsv")
    (days / "a.tsv").write_text("".join(map(line, range(39, -1, -1))))
    os.utime(days / "a.tsv", ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = rows_of(days)
    assert built
    assert changed.digest != digest
    assert changed.take(np.array([0]), Buffers()).columns["label"][0] == 1


def test_a_damaged_index_is_made_again(days):
    rows_of(days)
    (path,) = (indexed.cache_folder() / "index").glob("*.npz")
    path.write_bytes(path.read_bytes()[:100])
    assert rows_of(days).rows == 65


def test_a_digest_is_of_the_content(days, tmp_path):
    digest = rows_of(days).digest
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in days.glob("*.tsv"):
        path.rename(moved / path.name)
    assert rows_of(moved).digest == digest


@pytest.mark.parametrize("budget", [None, 0])
def test_a_bad_row_is_named_by_file_and_line(days, budget):
    with open(days / "c.tsv", "a") as file:
        file.write("\n\n" + line(3).replace("\t00000016", "\t0000z016") + line(4))
    rows = rows_of(days, budget=budget)
    with pytest.raises(DataError, match="expected hexadecimal digits") as caught:
        rows.take(np.arange(rows.rows), Buffers())
    assert f"{days}/c.tsv:28 (byte " in caught.value.where.replace(os.path.relpath(days), str(days))
    assert rows.where(65).split(":")[1].startswith("28")


def test_bad_rows_are_skipped_counted_and_named(days):
    with open(days / "a.tsv", "a") as file:
        file.write("nonsense\n" + line(3) + "1\t2\n")
    rows = rows_of(days, faults=ErrorPolicy("skip", 2))
    assert rows.rows == 66
    assert "2 bad rows skipped" in rows.notes()[0]
    assert "a.tsv:41" in rows.notes()[0]
    block = rows.take(np.arange(66), Buffers())
    assert len(block) == 66
    again = rows_of(days, faults=ErrorPolicy("skip", 2))
    assert again.notes() == rows.notes()
    with pytest.raises(DataError, match="2 rows are bad, and max_errors is 1"):
        rows_of(days, faults=ErrorPolicy("skip", 1))


@pytest.mark.parametrize("how", ["shorter", "longer", "gone"])
def test_a_file_that_changes_while_it_is_read_is_named(days, how):
    rows = rows_of(days, budget=0, quiet_s=0.0)
    rows.take(np.arange(5), Buffers())
    if how == "gone":
        (days / "a.tsv").unlink()
    elif how == "longer":
        with open(days / "a.tsv", "a") as file:
            file.write(line(1))
    else:
        os.truncate(days / "a.tsv", 100)
    with pytest.raises(DataError, match="has gone" if how == "gone" else "has changed"):
        rows.take(np.arange(40), Buffers())


def test_rows_can_be_sent_to_another_process(days):
    rows = rows_of(days, budget=0)
    rows.take(np.arange(3), Buffers())
    again = pickle.loads(pickle.dumps(rows))
    assert again.take(np.array([64]), Buffers()).columns["label"].tolist() == [0]


def test_no_rows_are_an_error(tmp_path):
    (tmp_path / "a.tsv").write_text("\n\n")
    with pytest.raises(DataError, match="the files hold no rows"):
        rows_of(tmp_path)


def test_a_line_without_an_end_stays_within_bounds(tmp_path):
    (tmp_path / "a.tsv").write_bytes(line(1).encode() + b"7" * (1 << 20))
    with pytest.raises(DataError, match=r"no row ends within 262,144 bytes"):
        rows_of(tmp_path, budget=0, piece=1 << 16, longest_row=1 << 18)


def test_ranks_get_whole_files_where_there_are_enough(days):
    made = Pipeline(rows_of(days)).batch(8)
    parts = [made.shard(rank, 2, by="files") for rank in range(2)]
    found = [[n for batch in part.batches(0) for n in batch.indices.tolist()] for part in parts]
    assert sorted(found) == [list(range(40)), list(range(40, 65))]
    assert {part.steps for part in parts} == {9}
    with pytest.raises(DataError, match="at least 4 files, found 3"):
        list(made.shard(0, 4, by="files").batches(0))


def test_sharing_after_a_split_counts_what_is_left(days):
    made = Pipeline(rows_of(days)).split(0.5, by="order")[0].batch(8)
    assert {made.shard(rank, 2, by="rows").steps for rank in range(2)} == {4}


def test_describing(days):
    assert rows_of(days).describe() == "3 Criteo files, 14.1 kB, 65 rows"
