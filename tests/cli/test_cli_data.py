import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import flatout
from flatout.cli.main import app
from flatout.data.conversion.convert import convert
from flatout.data.conversion.progress import progress
from flatout.data.reading.schema import as_schema
from flatout.errors import DataError


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.output


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "day.svm"
    path.write_text("".join(f"{n % 2} 1:{n} 3:0.5\n" for n in range(50)))
    return path


def test_text_becomes_rows_and_shards(text, tmp_path):
    said = run("convert", text, tmp_path / "day.rows")
    assert "50 rows in " in said
    read = next(line for line in said.splitlines() if line.startswith("read it: "))
    pipeline = eval(read.removeprefix("read it: "), {"flatout": flatout})
    (batch,) = pipeline.batch(50).batches(0)
    assert batch.inputs[:, 0].tolist() == list(range(50))
    found = json.loads(run("convert", text, tmp_path / "day.tfrecord", "--shards", 2, "--json"))
    assert found["rows"] == 50
    assert len(found["files"]) == 2


@pytest.mark.parametrize("to", ["tfrecord", "parquet"])
def test_the_line_that_reads_shards_does(text, tmp_path, to):
    said = run("convert", text, tmp_path / f"day.{to}", "--rows-per-shard", 20)
    read = next(line for line in said.splitlines() if line.startswith("read it: "))
    pipeline = eval(read.removeprefix("read it: "), {"flatout": flatout})
    assert pipeline.batch(10).samples == 50
    assert pipeline.schema.columns == as_schema(tmp_path / f"_day.{to}.toml", to).columns


def test_the_line_that_reads_images_does(tmp_path):
    from PIL import Image

    for kind in ("cat", "dog"):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        Image.new("RGB", (8, 8), kind == "cat").save(tmp_path / "pets" / kind / "a.png")
    said = run("convert", tmp_path / "pets", tmp_path / "pets.tfrecord")
    read = next(line for line in said.splitlines() if line.startswith("read it: "))
    assert "classes=['cat', 'dog']" in read
    ours = eval(read.removeprefix("read it: "), {"flatout": flatout})
    theirs = flatout.data.images(tmp_path / "pets", size=224)
    for one, other in zip(ours.batch(1).batches(0), theirs.batch(1).batches(0), strict=True):
        assert one.inputs.tolist() == other.inputs.tolist()
        assert one.targets.tolist() == other.targets.tolist()


def test_options_of_convert(text, tmp_path):
    options = ["--shuffle", 3, "--balance", "class", "--to", "tfrecord", "--shard-bytes", 500]
    found = json.loads(run("convert", text, tmp_path / "out" / "day", *options, "--json"))
    assert len(found["files"]) > 1
    assert found["files"][0].startswith(str(tmp_path / "out" / "day-00000-of-"))
    settings = json.loads((tmp_path / "out" / "_day.tfrecord.json").read_text())["settings"]
    assert (settings["shuffle"], settings["balance"]) == (3, "class")
    with pytest.raises(DataError, match="shuffle was 3, now None"):
        run("convert", text, tmp_path / "out" / "day.tfrecord")
    run("convert", text, tmp_path / "out" / "day.tfrecord", "--overwrite")
    again = run("convert", text, tmp_path / "out" / "day.tfrecord")
    assert "50 rows were there already; their checksums are good" in again


def test_bad_rows_end_it_or_are_skipped(text, tmp_path):
    with text.open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(DataError, match=r"day\.svm:51"):
        run("convert", text, tmp_path / "day.rows")
    found = json.loads(run("convert", text, tmp_path / "b.rows", "--on-error", "skip", "--json"))
    assert found["rows"] == 50
    assert "1 bad row skipped" in found["notes"][0]
    with pytest.raises(DataError, match="max_errors is 0"):
        run("convert", text, tmp_path / "c.rows", "--on-error", "skip", "--max-errors", 0)


def test_inspect_says_what_is_there_and_writes_the_schema(text, tmp_path):
    said = run("inspect", text, "--schema", tmp_path / "schema.toml")
    first = said.splitlines()[0]
    assert first.startswith("1 file ")
    assert "50 rows · label 50.0% · 2 fields · max id 3" in first
    assert first.endswith(f"→ {tmp_path / 'schema.toml'}")
    source = flatout.data.libsvm(text, schema=tmp_path / "schema.toml")
    assert source.batch(10).samples == 50
    found = json.loads(run("inspect", text, "--format", "libsvm", "--json"))
    assert found["classes"] == {"0": 25, "1": 25}


def test_inspect_leaves_a_schema_that_was_edited_as_it_is(text, tmp_path):
    schema = tmp_path / "schema.toml"
    run("inspect", text, "--schema", schema)
    written = schema.read_text()
    run("inspect", text, "--schema", schema)  # the same again is no loss
    edited = written.replace('role = "target"', 'role = "unused"')
    schema.write_text(edited)
    with pytest.raises(DataError, match="is there already, and holds something else") as caught:
        run("inspect", text, "--schema", schema)
    assert "--overwrite" in caught.value.do
    assert schema.read_text() == edited
    run("inspect", text, "--schema", schema, "--overwrite")
    assert schema.read_text() == written


def test_inspect_counts_bad_rows_and_exits_with_0(text):
    text.write_text(text.read_text() + "1 5:1 2:1\n" * 150)
    said = run("inspect", text)
    assert "150 bad rows: " in said
    assert "day.svm:51 (byte" in said


def test_bench_shows_what_it_measured(text):
    said = run("bench", text, "--seconds", 0.05, "--batch-size", 10)
    assert "50 rows: opened in" in said
    assert "batches of 10, shuffled" in " ".join(said.split())
    found = json.loads(run("bench", text, "--seconds", 0.05, "--json"))
    assert found["measured"][0]["threads"] == 1


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("command", ["inspect", "bench"])
def test_screens_are_no_wider_than_the_terminal(text, monkeypatch, columns, command):
    monkeypatch.setenv("COLUMNS", columns)
    options = ["--seconds", 0.05] if command == "bench" else []
    lines = run(command, text, *options).splitlines()
    assert max(map(len, lines)) <= int(columns)


def test_wrong_usage_is_named(text):
    said = run("convert", text, code=2)
    assert "at least one source and a target" in said
    for words in (
        ["convert", text, "a.rows", "--balance", "rows"],
        ["convert", text, "a.rows", "--shards", 0],
        ["convert", text, "a.rows", "--to", "excel"],
        ["inspect"],
        ["bench", text, "--batch-size", 0],
        ["fly"],
    ):
        run(*words, code=2)


@pytest.mark.slow
def test_errors_are_for_people(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "from flatout.cli.main import main; main()", "data", "inspect",
         str(tmp_path / "absent.svm")],
        capture_output=True, text=True, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no file")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_progress_goes_to_stderr_and_only_after_a_while(text, tmp_path, capsys):
    with progress("converting", 50, line_every_s=0.0) as tell:
        tell(50, "2 of 2 shards done")
    said = capsys.readouterr()
    assert said.out == ""
    assert "converting  100%  50 rows" in said.err
    assert "2 of 2 shards done" in said.err
    convert(text, tmp_path / "again.tfrecord", shards=2)
    assert capsys.readouterr().err == ""
