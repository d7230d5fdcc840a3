"""Scripts of the corpus as they are: the pitfall is named with its line, and not in the twin."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.devices.inventory import inventory
from flatout.doctor.judge import judge
from flatout.observe import Observation

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).parents[2] / "bench" / "corpus"
TWO = (
    "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python",
    sys.executable,
)  # fmt: skip
NAMES = {
    "saved_by_all": TWO,
    "one_rank_works": TWO,
    "shards_uneven": TWO,
    "shapes_recompile": (),
    "openmp_settings_inert": (),
}


def found_in(script, start, folder):
    """The findings of a script's first forty steps."""
    watch = ("-m", "flatout.observe.start", "seen", "--steps", "40", str(script))
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
    return judge(ranks, inventory()).findings


@pytest.mark.parametrize("name", NAMES)
def test_the_pitfall_is_named_with_its_line_and_the_twin_has_none(name, tmp_path):
    script = CORPUS / "pitfall" / f"{name}.py"
    lines = script.read_text().splitlines()
    (found,) = [one for one in found_in(script, NAMES[name], tmp_path) if one.name == name]
    file, _, line = found.where.rpartition(":")
    assert Path(file).name == script.name
    assert lines[int(line) - 1].endswith("# <- here")
    (tmp_path / "clean").mkdir()
    twin = found_in(CORPUS / "clean" / f"{name}.py", NAMES[name], tmp_path / "clean")
    assert not {one.name for one in twin} & {*NAMES, "shm_too_small"}
