import argparse
import json
import re
import sys

import pytest

from flatout.measure import Interval, fingerprint
from restarts import Peer, Row
from results import (
    Key,
    Results,
    add_arguments,
    command_words,
    commit,
    finish,
    interval_words,
    lines_of,
    positive,
    rows_as_data,
)


@pytest.mark.parametrize(
    ("found", "bounds", "met"),
    [
        (1.05, {"at_most": 1.05}, True),
        (1.06, {"at_most": 1.05}, False),
        (3.0, {"at_least": 3}, True),
        (2.9, {"at_least": 3}, False),
        (Interval(2.0, 3.1, 4.0), {"at_least": 3}, True),
        (Interval(2.0, 2.9, 4.0), {"at_least": 3}, False),
        ("absent: jax is not installed", {"at_least": 3}, False),
        (7.0, {}, None),
        ("absent: jax is not installed", {}, None),
    ],
)
def test_a_key_is_met_on_the_right_side_of_its_bound(found, bounds, met):
    assert Key("key", found, **bounds).met is met


def test_a_key_says_value_bound_and_verdict_in_one_line():
    key = Key("a_vs_b", Interval(0.951, 1.0, 1.0521), at_most=1.05, note="of 3")
    assert key.words == "a_vs_b 1 [0.951, 1.052], at most 1.05, met, of 3"
    assert Key("c", 2.0, at_least=3).words == "c 2, at least 3, NOT MET"
    assert Key("d", "b: absent: x is not installed", at_least=3).words == (
        "d not measured (b: absent: x is not installed), at least 3, NOT MET"
    )
    assert Key("e", 2.0).words == "e 2"


def test_interval_words_keep_four_digits():
    assert interval_words(Interval(12345.6, 1.23456, 0.00012345)) == "1.235 [1.235e+04, 0.0001234]"


@pytest.fixture
def rows():
    return {
        "ours": Row(Peer("ours", "a.py"), "", [0.001, 0.002, 0.003], [0.5, 0.6, 0.7], ["", "", ""]),
        "theirs": Row(Peer("theirs", "b.py"), "", [0.004, 0.008, 0.006], [0.9] * 3, [""] * 3),
        "lost": Row(Peer("lost", "c.py"), "absent: lost is not installed"),
    }


def test_lines_hold_median_range_ratio_and_accuracy(rows):
    ours, theirs, lost = lines_of(
        rows, "ours", lambda seconds: f"{seconds * 1e3:.0f} ms", lambda seconds: f"{1 / seconds:g}"
    )
    assert ours[:4] == ["ours", "2 ms", "500", "1 ms .. 3 ms"]
    assert ours[5:] == ["60.0%", ""]
    assert theirs[1:4:2] == ["6 ms", "4 ms .. 8 ms"]
    assert theirs[4].startswith("3 [")
    assert lost == ["lost", "", "", "", "", "", "absent: lost is not installed"]


def test_lines_do_without_the_reference(rows):
    lines = lines_of(rows, "lost", str)
    assert [line[3] for line in lines] == ["", "", ""]


def test_data_holds_every_restart(rows):
    ours, theirs, lost = rows_as_data(rows, "ours")
    assert ours["seconds_per_step"] == [0.001, 0.002, 0.003]
    assert theirs["time_vs_ours"]["mid"] == pytest.approx(3.0)
    assert lost["time_vs_ours"] is None
    assert lost["reason"] == "absent: lost is not installed"
    json.dumps([ours, theirs, lost], allow_nan=False)


@pytest.mark.parametrize(("value", "met"), [(0.7, False), (0.9, True), (0.99, False)])
def test_a_key_may_have_two_bounds(value, met):
    assert Key("covered", value, at_least=0.85, at_most=0.97).met is met


@pytest.fixture
def results(rows):
    good, bad = Key("good", 1.0, at_most=2), Key("bad", "lost: absent", at_least=2)
    return Results(
        title="A bench",
        headers=["", "ms", "fastest .. slowest", "time / ours", "accuracy", ""],
        lines=lines_of(rows, "ours", lambda seconds: f"{seconds * 1e3:.0f}"),
        remarks=["ours, restart 1: [bf16]"],
        keys=[good, bad, Key("seen", 3.0)],
        data={"rows": rows_as_data(rows, "ours")},
    )


def parse(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser, restarts=7)
    return parser.parse_args(words)


def test_the_table_shows_every_peer_the_absent_one_too(results, capsys):
    assert finish(results, parse()) == 0
    out = capsys.readouterr().out
    assert "absent: lost is not installed" in out
    assert "ours, restart 1: [bf16]" in out
    assert out.index("A bench") < out.index("theirs") < out.index("good 1, at most 2, met")
    assert "bad not measured (lost: absent), at least 2, NOT MET" in out


def test_json_on_stdout_stands_alone(results, capsys):
    assert finish(results, parse("--json")) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["keys"] == {"good": 1.0, "bad": None, "seen": 3.0}
    assert found["details"]["bad"]["note"] == "lost: absent"
    assert found["details"]["good"]["met"] is True
    assert [row["name"] for row in found["rows"]] == ["ours", "theirs", "lost"]
    assert found["machine"]["cpus"] >= 1
    assert "A bench" in captured.err


def test_json_goes_to_a_file_and_the_table_to_stdout(results, tmp_path, capsys):
    file = tmp_path / "results.json"
    finish(results, parse("--json", str(file)))
    assert json.loads(file.read_text())["keys"]["good"] == 1.0
    assert "A bench" in capsys.readouterr().out


def test_json_names_the_run_and_holds_its_table(results, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/some/where/bench/trainer.py", "--json", "--restarts", "2"])
    finish(results, parse("--json"))
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == "python bench/trainer.py --restarts 2"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["commit"] == commit()
    assert found["hardware"] == fingerprint().words
    (table,) = found["tables"]
    assert table["title"] == "A bench"
    assert table["headers"] == results.headers
    assert table["lines"] == results.lines
    assert found["remarks"] == ["ours, restart 1: [bf16]"]


def test_a_command_is_told_without_this_machines_folders():
    words = ["bench/a.py", "--data", "/some/where", "--json", "/else/where.json", "--only", "x y"]
    assert command_words(words) == "python bench/a.py --data DIR --only 'x y'"
    assert command_words(["a.py", "--json=b.json", "--check"]) == "python bench/a.py --check"


def test_the_commit_is_none_outside_of_git(monkeypatch, tmp_path):
    assert commit() is None or re.fullmatch(r"[0-9a-f]{12,}(-dirty)?", commit())
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert commit() is None


def test_only_check_makes_a_missed_key_an_error(results):
    assert finish(results, parse("--check")) == 1
    met = Results("A", [""], [], [], [Key("good", 1.0, at_most=2), Key("seen", 3.0)], {})
    assert finish(met, parse("--check")) == 0


def test_numbers_of_runs_are_positive():
    assert positive("3") == 3
    with pytest.raises(SystemExit):
        parse("--restarts", "0")
