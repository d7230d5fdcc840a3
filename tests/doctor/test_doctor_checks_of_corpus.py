"""Scripts of the corpus: the pitfall is named with its line, and not in the clean script."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.devices.inventory import inventory
from flatout.devices.memory import Shm
from flatout.doctor.judge import judge
from flatout.observe import Observation
from pitfalls import read_index

pytestmark = pytest.mark.slow

PITFALLS = {pitfall.name: pitfall for pitfall in read_index()}
TWO = (
    "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python",
    sys.executable,
)  # fmt: skip
NAMES = {
    "saved_by_all": TWO,
    "one_rank_works": TWO,
    "collectives_each_step": TWO,
    "shards_missing": TWO,
    "shards_overlap": TWO,
    "shards_uneven": TWO,
    "shapes_recompile": (),
    "openmp_settings_inert": (),
}
LONG = (
    "collectives_each_step",
    "saved_by_all",
    "shards_missing",
    "shards_overlap",
    "shards_uneven",
    "shapes_recompile",
)


def found_in(script, start, folder, machine=None):
    """The findings of a script's first steps."""
    watch = ("-m", "flatout.observe.start", "seen", "--steps", "24", str(script))
    done = subprocess.run(
        [sys.executable, *start, *watch],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    files = sorted((folder / "seen").glob("rank-*.json"))
    ranks = [Observation.of(json.loads(file.read_text())) for file in files]
    assert len(ranks) == (2 if start else 1)
    return judge(ranks, machine or inventory()).findings


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.long if one in LONG else ()) for one in NAMES]
)
def test_the_pitfall_is_named_with_its_line_and_the_clean_script_has_none(name, tmp_path):
    script = PITFALLS[name].script
    lines = script.read_text().splitlines()
    (found,) = [one for one in found_in(script, NAMES[name], tmp_path) if one.name == name]
    file, _, line = found.where.rpartition(":")
    assert Path(file).name == script.name
    assert lines[int(line) - 1].endswith("# <- here")
    (tmp_path / "clean").mkdir()
    clean = found_in(PITFALLS[name].write_clean(tmp_path), NAMES[name], tmp_path / "clean")
    assert not {one.name for one in clean} & {*NAMES, "shm_too_small"}


LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(320, 4096)), 16, num_workers=2, prefetch_factor=4)
model = torch.nn.Linear(4096, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for (x,) in loader:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_batches_of_a_loader_are_held_against_what_is_free(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOADER)
    # Nine batches of 256 KiB.
    for free, many in ((2 << 20, 1), (3 << 20, 0)):
        machine = replace(inventory(), shm=Shm(free, free, too_small_for_workers=True))
        found = [one for one in found_in(script, (), tmp_path, machine) if one.kind == "danger"]
        assert [one.name for one in found] == ["shm_too_small"] * many
        assert all(one.where.endswith("script.py:4") for one in found)
