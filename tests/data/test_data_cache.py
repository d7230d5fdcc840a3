import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_made_up import MadeUp, same

from flatout.data.pipeline import Pipeline
from flatout.data.stores.row_folder import Filling, RowFolder
from flatout.data.stores.row_store import layout_of
from flatout.errors import DataError


def epochs(pipeline, count=3):
    return [batch for epoch in range(count) for batch in pipeline.batches(epoch)]


def plain(source=None):
    return Pipeline(source or MadeUp()).shuffle(seed=1).batch(8)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("threads", [1, 3])
def test_cached_batches_are_those_without_a_cache(where, threads):
    source = MadeUp(300)
    cached = plain(source).cache(where).options(threads=threads)
    found, wanted = epochs(cached), epochs(plain(MadeUp(300)))
    assert len(found) == len(wanted)
    assert all(map(same, found, wanted))
    source.taken.clear()
    epochs(cached)
    assert source.taken == []


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_half_an_epoch_fills_half_the_cache(where):
    source = MadeUp(80)
    pipeline = plain(source).cache(where).options(threads=1, depth=1)
    for step, _ in enumerate(pipeline.batches(0)):
        if step == 4:
            break
    assert all(map(same, epochs(pipeline), epochs(plain(MadeUp(80)))))


def test_what_another_process_made_is_there(tmp_path):
    epochs(plain().cache("disk"), 1)
    source = MadeUp()
    pipeline = plain(source).cache("disk")
    assert all(map(same, epochs(pipeline), epochs(plain())))
    assert len(source.taken) <= 100  # the probe that tells the size
    assert "on the disk already" in "".join(pipeline.notes())


def test_other_data_have_a_cache_of_their_own():
    epochs(plain().cache("disk"), 1)
    other = MadeUp(name="other")
    epochs(plain(other).cache("disk"), 1)
    assert len(other.taken) >= 100


def test_a_split_caches_only_its_part():
    source = MadeUp(100)
    train, test = plain(source).cache().split(0.75, seed=3)
    for part, size in ((train, 75), (test, 25)):
        source.taken.clear()
        found = epochs(part, 2)
        assert sum(batch.size for batch in found) == 2 * size
        assert len(set(source.taken)) == size
    wanted = plain(MadeUp(100)).split(0.75, seed=3)
    assert all(map(same, epochs(train), epochs(wanted[0])))


def test_a_cache_behind_a_function_keeps_what_it_made():
    calls = []

    def double(inputs, target):
        calls.append(1)
        return inputs["x"] * 2, target

    pipeline = plain().options(threads=1)
    first = Pipeline(MadeUp()).shuffle(seed=1).map(double).batch(8).cache()
    found = epochs(first)
    assert (
        len(calls) <= 100 + 64 + 1 + 32
    )  # each sample, the probe, a look at the form, 16 of them twice
    for ours, theirs in zip(found, epochs(pipeline), strict=True):
        assert ours.inputs.tolist() == (theirs.inputs["x"] * 2).tolist()


def test_rows_that_are_skipped_stay_away():
    source = MadeUp(50)
    source.left_out = (7, 8, 21)
    pipeline = plain(source).cache("memory").options(threads=1)
    for _ in range(2):
        numbers = [int(n) for batch in pipeline.batches(0) for n in batch.indices]
        assert sorted(numbers) == [n for n in range(50) if n not in (7, 8, 21)]


def test_what_does_not_fit_is_refused_with_the_numbers(monkeypatch):
    from flatout.data.execution import cache

    with pytest.raises(DataError, match=r"100 decoded samples take .* but memory has 10 bytes"):
        list(plain().cache("memory").options(memory=10).batches(0))

    class Usage:
        free = 5

    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(DataError, match=r"memory has .* and .* free"):
        list(plain().cache().options(memory=10).batches(0))


def test_auto_goes_to_the_disk_where_memory_is_small(tmp_path):
    pipeline = plain().cache(folder=str(tmp_path / "here")).options(memory=10)
    assert all(map(same, epochs(pipeline), epochs(plain())))
    assert "cache in a folder" in "".join(pipeline.notes())
    assert len(os.listdir(tmp_path / "here")) == 1


def filled_block(rows=40):
    from flatout.data.reading.buffers import Buffers

    return MadeUp(rows).take(np.arange(rows), Buffers())


def test_a_folder_is_whole_or_absent(tmp_path):
    block = filled_block()
    filling = Filling(tmp_path / "rows", layout_of(block.columns), 40, "digest")
    filling.put(np.arange(40), dict(block.columns))
    assert not (tmp_path / "rows").exists()
    filling.finish(None, {"schema": "text"})
    filling.close()
    folder = RowFolder(tmp_path / "rows")
    folder.verify()
    assert folder.meta["schema"] == "text"
    from flatout.data.reading.buffers import Buffers

    taken = folder.take(np.array([39, 0, 3]), Buffers())
    assert taken.columns["x"][:, 0].tolist() == [39, 0, 3]
    assert taken.columns["ids"].values.tolist() == [39, 39, 39, 3, 3, 3]


def test_two_processes_do_not_fill_the_same_folder(tmp_path):
    block = filled_block()
    filling = Filling(tmp_path / "rows", layout_of(block.columns), 40, "digest")
    with pytest.raises(BlockingIOError):
        Filling(tmp_path / "rows", layout_of(block.columns), 40, "digest")
    filling.close()
    Filling(tmp_path / "rows", layout_of(block.columns), 40, "digest").close()


def test_a_damaged_folder_is_named(tmp_path):
    block = filled_block()
    filling = Filling(tmp_path / "rows", layout_of(block.columns), 40, "digest")
    filling.put(np.arange(40), dict(block.columns))
    filling.finish(None, {})
    filling.close()
    path = tmp_path / "rows" / "rows.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="checksum differs"):
        RowFolder(tmp_path / "rows").verify()
    path.write_bytes(data[:-1])
    with pytest.raises(DataError, match="expected 1,600 bytes, found 1,599"):
        RowFolder(tmp_path / "rows")
    shutil.rmtree(tmp_path / "rows")
    with pytest.raises(DataError, match="no row cache is here"):
        RowFolder(tmp_path / "rows")


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from data_made_up import MadeUp
from flatout.data.pipeline import Pipeline

class Slow(MadeUp):
    def take(self, numbers, buffers):
        time.sleep(0.01)
        return super().take(numbers, buffers)

pipeline = Pipeline(Slow(2000)).shuffle(seed=1).batch(8).cache("disk").options(threads=1)
for batch in pipeline.batches(0):
    (cache,) = pipeline._built.caches
    print(int(cache._filled.sum()), flush=True)
"""


@pytest.mark.slow
def test_what_a_killed_process_filled_is_begun_again(tmp_path):
    here = str(Path(__file__).parent)
    killed = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, here], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert killed.stdout is not None
    killed.stdout.readline()
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    (part,) = (Path(os.environ["FLATOUT_CACHE"]) / "rows").glob("*.part")
    pipeline = Pipeline(MadeUp(2000)).shuffle(seed=1).batch(8).cache("disk")
    assert all(map(same, epochs(pipeline, 2), epochs(plain(MadeUp(2000)), 2)))
    assert not part.exists()
