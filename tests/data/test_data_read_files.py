"""Which files a source reads, in figures."""

import os

import pytest
import torch

from flatout.data import arrays, csv, files_read, mix


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for at, path in enumerate(paths):
        path.write_text("x,y\n" + "1.5,0\n2.5,1\n" * (at + 1))
        os.utime(path, (1_700_000_000 + at, 1_700_000_000 + at))
    return paths


def test_files_are_counted_with_their_bytes_and_the_newest(files):
    source = csv(list(map(str, files)), target="y").shuffle(seed=1).batch(2)
    found = files_read(source)
    assert found.files == 2
    assert found.bytes == sum(path.stat().st_size for path in files)
    assert found.newest == 1_700_000_001


def test_a_mixture_has_the_files_of_all_once(files):
    first, second = (csv(str(path), target="y") for path in files)
    assert files_read(mix(first, second, first)).files == 2


def test_what_comes_from_no_files_has_none_and_what_is_gone_does_not_count(files):
    assert files_read(arrays(torch.zeros(4, 2), torch.zeros(4)).batch(2)) is None
    assert files_read(object()) is None
    source = csv(list(map(str, files)), target="y")
    files[1].unlink()
    found = files_read(source)
    assert (found.files, found.bytes) == (2, files[0].stat().st_size)
