"""`flatout doctor --page --trace --write-baseline --ci`: the files of a verdict."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from flatout.cli.main import app

SCRIPT = """
    import torch
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 8), torch.randint(0, 2, (64,))
    for step in range(200):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def doctor(folder, *arguments):
    call = "from flatout.cli.main import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", call, "doctor", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
    )
    return found.returncode, found.stdout, found.stderr


def test_what_cannot_be_written_or_read_is_told_before_the_script_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    (tmp_path / "mine.toml").write_text("[compute]\nprecision = 'bf16'\n")
    for option, path in (
        ("--page", "no/where.html"),
        ("--ci", "absent.json"),
        ("--recipe", "mine.toml"),
        ("--recipe", "no/where.toml"),
    ):
        done = CliRunner().invoke(app, ["doctor", "--in-place", option, path, "train.py"])
        assert done.exit_code not in (0, 3)
        assert path in f"{done.exception}{done.output}"
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_page_a_trace_and_a_baseline_to_compare_with(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    code, out, error = doctor(
        tmp_path,
        "--json",
        "--page",
        "a.html",
        "--trace",
        "t.json",
        "--write-baseline",
        "b.json",
        "train.py",
    )
    assert code == 0, error
    assert json.loads(out)["compared"] is None
    assert "train.py" in (tmp_path / "a.html").read_text()
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    known = json.loads((tmp_path / "b.json").read_text())
    # As if steps had been a hundred times as fast.
    known["run"]["step_ms"] = [ms / 100 for ms in known["run"]["step_ms"]]
    (tmp_path / "fast.json").write_text(json.dumps(known))
    code, out, error = doctor(tmp_path, "--ci", "fast.json", "train.py")
    assert code == 3, error
    assert "SLOWER" in out
    known["run"]["step_ms"] = [ms * 1e4 for ms in known["run"]["step_ms"]]
    (tmp_path / "slow.json").write_text(json.dumps(known))
    code, out, error = doctor(tmp_path, "--ci", "slow.json", "--json", "train.py")
    assert code == 0, error
    assert json.loads(out)["compared"]
