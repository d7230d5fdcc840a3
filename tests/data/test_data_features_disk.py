"""What was said to be kept on the disk is there in the next run, whatever ends this one."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.cache_folder import cache_folder
from flatout.data.features import files
from flatout.data.features.row_log import RECORD, RowPart
from flatout.data.features.store import FeatureStore

ROW = [RowPart((5, 3), torch.bfloat16), RowPart((), torch.int64)]
STRIDE = 32 + 8


def values_of(slots):
    numbers = torch.as_tensor(np.asarray(slots))
    return [(numbers[:, None, None] + torch.arange(15).reshape(5, 3)).bfloat16(), numbers]


def opened(slots=100, **given):
    store = FeatureStore.open("key", slots, ROW, **{"where": "disk", **given})
    store.told = []
    store.say = store.told.append
    return store


def fill(store, slots):
    store.put(np.asarray(slots), values_of(slots))


def assert_holds(store, slots):
    slots = np.asarray(slots)
    assert store.has(slots).all()
    for given, expected in zip(store.get(slots), values_of(slots), strict=True):
        assert torch.equal(given, expected)


def folder():
    (found,) = (cache_folder() / "features").glob("*/")
    return found


def test_the_next_run_goes_on_where_this_one_ended():
    first = opened()
    assert first.where == "disk"
    fill(first, range(40))
    first.close()
    second = opened()
    assert second.kept == 40
    assert_holds(second, range(39, -1, -3))
    assert not second.has(np.array([40, 99])).any()
    fill(second, range(100))
    second.flush()
    assert_holds(second, range(100))


def test_more_slots_find_what_fewer_have_kept():
    fill(opened(50), range(50))
    more = opened(80)
    assert more.kept == 50
    fill(more, range(50, 80))
    assert_holds(more, range(80))
    assert opened(20).kept == 20
    assert_holds(opened(20), range(20))


def test_another_key_or_row_finds_nothing():
    fill(opened(), range(3))
    assert FeatureStore.open("another", 100, ROW, "disk").kept == 0
    wider = [RowPart((5, 3), torch.float16), ROW[1]]
    assert FeatureStore.open("key", 100, wider, "disk").kept == 0


def test_no_one_else_may_read_it():
    fill(opened(), range(3))
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder().rglob("*")}
    assert modes == {"rows": 0o600, "filled.log": 0o600}
    assert folder().stat().st_mode & 0o777 == 0o700


def test_rows_are_found_by_their_names_wherever_they_are():
    random = np.random.default_rng(0)
    names = random.integers(0, 2**63, (30, 2), dtype=np.uint64)
    names[7, 0] = names[8, 0]  # which alone does not tell them apart
    fill(opened(30, names=names), range(30))
    order = random.permutation(30)
    moved = opened(31, names=np.concatenate([names[order], np.array([[1, 2]], np.uint64)]))
    has = moved.has(np.arange(31))
    assert not has[30]
    assert has.sum() >= 29  # of two names that begin alike one may be missed, but never mistaken
    slots = np.flatnonzero(has)
    assert torch.equal(moved.get(slots)[1], torch.from_numpy(order[slots]))
    replaced = names.copy()
    replaced[3, 1] += 1
    assert np.flatnonzero(~opened(30, names=replaced).has(np.arange(30))).tolist()[0] == 3


# ---- where ----


def test_what_fits_on_the_disk_is_kept_there_and_else_in_memory(monkeypatch):
    monkeypatch.setattr("flatout.data.features.kept_rows.memory_room", lambda share=0.5: 4000)
    monkeypatch.setattr("flatout.data.features.kept_rows.disk_room", lambda: 4000)
    assert opened(where="auto").where == "disk"
    monkeypatch.setattr("flatout.data.features.kept_rows.disk_room", lambda: 3999)
    store = opened(where="auto")
    assert store.where == "memory"
    assert store.reason == "100 rows take 4.0 kB, 4.0 kB free in memory"
    monkeypatch.setattr("flatout.data.features.kept_rows.memory_room", lambda share=0.5: 3998)
    assert opened(where="auto").where == "disk"


def test_what_is_there_is_used_though_no_more_fits(monkeypatch):
    fill(opened(), range(30))
    monkeypatch.setattr("flatout.data.features.kept_rows.disk_room", lambda: 2 * STRIDE)
    store = opened(where="auto")
    assert store.where == "disk"
    fill(store, range(28, 40))
    assert_holds(store, range(32))
    assert not store.has(np.arange(32, 100)).any()
    assert store.told == [
        "features: disk has no room for more than 32 rows; the others are computed each time"
    ]


def test_a_disk_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    store = opened()
    assert store.where == "memory"
    assert " cannot be written: " in store.reason
    fill(store, range(9))
    assert_holds(store, range(9))


# ---- what goes wrong ----


def test_flipped_bytes_are_noticed_named_and_put_again():
    fill(opened(), range(10))
    with open(folder() / "rows", "r+b") as file:
        file.seek(7 * STRIDE + 3)
        file.write(b"\xff")
    store = opened()
    assert store.has(np.arange(10)).tolist() == [True] * 7 + [False] + [True] * 2
    assert store.told == [
        "features: 1 row on disk differs from its checksum and is computed again: 7"
    ]
    assert store.kept == 9
    fill(store, range(10))
    assert_holds(store, range(10))
    assert_holds(opened(), range(10))


def test_a_flipped_record_loses_its_row_and_no_other():
    fill(opened(), range(10))
    with open(folder() / "filled.log", "r+b") as file:
        file.seek(4 * RECORD.itemsize + 2)
        file.write(b"\x05")
    store = opened()
    assert store.has(np.arange(10)).tolist() == [True] * 4 + [False] + [True] * 5
    fill(store, range(12))
    assert_holds(opened(), range(12))


@pytest.mark.parametrize("left", [0, 3 * STRIDE + 1])
def test_a_file_that_was_cut_loses_rows_and_no_more(left):
    fill(opened(), range(10))
    os.truncate(folder() / "rows", left)
    store = opened()
    assert not store.has(np.arange(10))[left // STRIDE :].any()
    fill(store, range(10))
    assert_holds(store, range(10))


def test_a_file_that_is_cut_meanwhile_ends_nothing():
    fill(opened(), range(10))
    store = opened()
    assert_holds(store, range(5))
    os.truncate(folder() / "rows", 0)
    assert not store.has(np.arange(5, 10)).any()
    with pytest.raises(EOFError):
        store.get(np.arange(5))


def test_a_record_that_was_begun_is_none():
    fill(opened(), range(10))
    os.truncate(folder() / "filled.log", 9 * RECORD.itemsize + 5)
    store = opened()
    assert store.kept == 9
    fill(store, range(10))
    assert_holds(opened(), range(10))


PROGRAM = """
import sys
import numpy as np, torch
from flatout.data.features.row_log import RowPart
from flatout.data.features.store import FeatureStore

ROW = [RowPart((5, 3), torch.bfloat16), RowPart((), torch.int64)]

def values_of(slots):
    numbers = torch.as_tensor(np.asarray(slots))
    return [(numbers[:, None, None] + torch.arange(15).reshape(5, 3)).bfloat16(), numbers]

store = FeatureStore.open("key", 100_000, ROW, sys.argv[1])
"""


def start(program, where="disk"):
    code = PROGRAM + textwrap.dedent(program)
    command = [sys.executable, "-c", code, where]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_a_kill_loses_nothing_that_was_kept():
    process = start(
        """
        for at in range(0, 100_000, 7):
            slots = np.arange(at, at + 7)
            store.put(slots, values_of(slots))
            print(at + 7 if store.has(slots).all() else "lost", flush=True)
        """
    )
    told = [process.stdout.readline() for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().splitlines()
    process.wait()
    kept = int((rest[-2:-1] or told[-1:])[0])
    store = opened(100_000)
    assert store.kept >= kept
    assert_holds(store, range(store.kept))
    assert not store.told


@pytest.mark.slow
def test_two_processes_that_fill_one_store_share_what_they_have():
    program = """
    order = np.random.default_rng(int(sys.stdin.readline())).permutation(2000)
    computed = 0
    for slots in np.split(order, 100):
        absent = slots[~store.has(slots)]
        store.put(absent, values_of(absent))
        computed += len(absent)
        assert store.has(slots).all()
        for given, expected in zip(store.get(slots), values_of(slots)):
            assert torch.equal(given, expected)
    print(computed)
    """
    both = [start(program), start(program)]
    for seed, one in enumerate(both):
        one.stdin.write(f"{seed}\n")
        one.stdin.close()
    computed = [int(one.stdout.read()) for one in both]
    assert [one.wait() for one in both] == [0, 0]
    assert 2000 <= sum(computed) < 4000
    store = opened(2000)
    assert store.kept == 2000
    assert_holds(store, range(2000))
    assert (folder() / "filled.log").stat().st_size == 2000 * RECORD.itemsize


@pytest.mark.slow
def test_processes_share_what_is_in_memory_while_the_first_one_lives():
    mine = opened(100_000, where="memory")
    fill(mine, range(10))
    process = start(
        """
        assert store.where == "memory" and store.kept == 10
        assert store.get(np.arange(10))[1].tolist() == list(range(10))
        store.put(np.arange(10, 20), values_of(range(10, 20)))
        """,
        "memory",
    )
    assert process.communicate()[0] == ""
    assert_holds(mine, range(20))
    mine.close()
    assert opened(100_000, where="memory").kept == 0


@pytest.mark.slow
def test_memory_of_a_process_that_was_killed_is_free():
    process = start(
        """
        store.put(np.arange(10), values_of(range(10)))
        print("there", flush=True)
        sys.stdin.read()
        """,
        "memory",
    )
    process.stdout.readline()
    other = opened(100_000, where="memory")
    assert other.kept == 10
    process.kill()
    process.communicate()
    assert_holds(other, range(10))
    assert opened(100_000, where="memory").kept == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_told_once_and_what_is_there_stays(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        monkeypatch.setenv("FLATOUT_CACHE", str(disk / "cache"))
        # As if another process had taken it since there was room.
        monkeypatch.setattr("flatout.data.features.kept_rows.disk_room", lambda: 1 << 30)
        row = [RowPart((50_000,), torch.uint8)]
        store = FeatureStore.open("key", 100, row, "disk")
        told = []
        store.say = told.append
        for slot in range(40):
            store.put(np.array([slot]), [torch.full((1, 50_000), slot, dtype=torch.uint8)])
        there = np.flatnonzero(store.has(np.arange(100)))
        assert 10 <= len(there) <= 20
        assert store.get(there)[0][:, 17].tolist() == there.tolist()
        assert told == [
            "features: nothing more can be kept: No space left on device; the others are computed "
            "each time"
        ]
        store.close()
        again = FeatureStore.open("key", 100, row, "disk")
        assert np.flatnonzero(again.has(np.arange(100))).tolist() == there.tolist()
        again.close()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_of_a_disk_some_stays_free(monkeypatch, tmp_path):
    class Found:
        f_blocks, f_bavail, f_frsize = 1000, 100, 4096

    monkeypatch.setattr(files.os, "statvfs", lambda place: Found)
    assert files.disk_room() == (100 - 50) * 4096


def test_clean_lists_and_removes_it():
    from flatout.doctor import remove
    from flatout.doctor.kept import kept

    store = opened()
    fill(store, range(10))
    (one,) = kept()
    assert (one.kind, one.is_used) == ("features", True)
    assert remove([one]) == []
    store.close()
    del store
    (one,) = kept()
    assert not one.is_used
    assert one.bytes < 100_000
    assert remove([one]) == [one]
    assert json.dumps(one.as_dict())
    assert not list(Path(cache_folder(), "features").glob("*/"))
