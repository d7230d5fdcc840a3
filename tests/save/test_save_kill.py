import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_saver.py")


def run(*args: object) -> list[dict[str, int]]:
    command = [sys.executable, str(PROGRAM), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_killed_ten_times_the_last_good_checkpoint_is_there(tmp_path: Path) -> None:
    [result] = run("random", tmp_path / "run", 10, 1)
    assert result["kills"] == 10
    assert result["last"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.long
def test_killed_a_hundred_times(tmp_path: Path, seed: int) -> None:
    [result] = run("random", tmp_path / "run", 100, seed)
    assert result["kills"] == 100
    assert result["told"] > 20
    assert result["within"] > 20  # struck while a checkpoint was being written


@pytest.mark.slow
def test_killed_before_every_file_operation_of_a_save(tmp_path: Path) -> None:
    results = run("instants", tmp_path)
    assert len(results) == 2
    for result in results:
        assert result["instants"] > 10
        assert result["old"] > 5
        assert result["new"] > 0  # while the old one was being deleted
