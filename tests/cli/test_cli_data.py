import json

import pytest
from typer.testing import CliRunner

import flatout
from flatout.cli.main import app
from flatout.errors import DataError


def run(*arguments):
    done = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "day.svm"
    path.write_text("".join(f"{n % 2} 1:{n} 3:0.5\n" for n in range(50)))
    return path


def test_text_becomes_rows_and_shards(text, tmp_path):
    said = run("convert", text, tmp_path / "day.rows")
    assert "50" in said
    rows = flatout.data.rows(tmp_path / "day.rows").batch(50)
    (batch,) = rows.batches(0)
    assert batch.inputs[:, 0].tolist() == list(range(50))
    found = json.loads(run("convert", text, tmp_path / "day.tfrecord", "--shards", 2, "--json"))
    assert found["rows"] == 50
    assert len(found["files"]) == 2


def test_bad_rows_end_it_or_are_skipped(text, tmp_path):
    with text.open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(DataError, match=r"day\.svm:51"):
        run("convert", text, tmp_path / "day.rows")
    found = json.loads(run("convert", text, tmp_path / "b.rows", "--on-error", "skip", "--json"))
    assert found["rows"] == 50
    assert "1 bad row skipped" in found["notes"][0]


def test_wrong_usage_is_named(text):
    done = CliRunner().invoke(app, ["data", "convert", str(text)])
    assert done.exit_code == 2
    assert "at least one source and a target" in done.output
