"""Tensors that are moved to pages of 2 MB keep their values."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from flatout.devices import huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="there are no huge pages"
)
ROWS = 2_100_000  # of 8 float32: 64 MiB and some


def huge_kilobytes(address):
    """What of the mapping with this address lies on huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            first, end = (int(part, 16) for part in line.split(" ")[0].split("-"))
            inside = first <= address < end
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return 0


@needs_huge_pages
def test_a_table_is_moved_once_with_its_values():
    table = nn.Parameter(torch.arange(ROWS * 8, dtype=torch.float32).reshape(ROWS, 8))
    huge_pages.move(table)
    there = table.data_ptr()
    if not (huge := huge_kilobytes(there + 2**22)):
        pytest.skip("the system has no huge page free")
    assert huge > 2**15
    assert torch.equal(table.detach().flatten(), torch.arange(ROWS * 8, dtype=torch.float32))
    huge_pages.move(table)
    assert table.data_ptr() == there
    assert torch.equal(copy.deepcopy(table), table)


@pytest.mark.parametrize("why", ["small", "viewed", "a view", "shared"])
def test_what_is_left_where_it_is(why):
    table = torch.zeros(ROWS if why != "small" else 1000, 8)
    view = table.detach() if why == "viewed" else None
    if why == "a view":
        table = torch.zeros(ROWS + 1, 8)[:ROWS]
    elif why == "shared":
        table.share_memory_()
    before = table.data_ptr()
    huge_pages.move(table)
    assert table.data_ptr() == before
    assert view is None or view.data_ptr() == before


def test_no_room_for_it_twice(monkeypatch):
    monkeypatch.setattr(huge_pages, "available_bytes", lambda: 2**26)
    table = torch.zeros(ROWS, 8)
    before = table.data_ptr()
    huge_pages.move(table)
    assert table.data_ptr() == before


@needs_huge_pages
def test_an_empty_one_is_there_already():
    found = huge_pages.empty(torch.Size((ROWS, 8)))
    assert found.shape == (ROWS, 8)
    before = found.data_ptr()
    huge_pages.move(found)
    assert found.data_ptr() == before
