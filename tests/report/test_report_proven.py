"""What a terminal shows of trials, and the Recipe file that they leave."""

import dataclasses
import io
import json
import os
from pathlib import Path

import pytest
from report_prescriptions import (
    BF16,
    CODE,
    COMPILE,
    DECODE,
    ITEM,
    UNTRIED,
    WORKERS,
    prescription,
    trial,
)
from report_verdicts import verdict as plain_verdict
from rich.console import Console

from flatout.doctor.finding import Edit, Finding
from flatout.doctor.judge import Verdict
from flatout.doctor.prescription import Prescription
from flatout.errors import FlatoutError
from flatout.observe import Observation
from flatout.recipe import Parity, effective, load
from flatout.report import recipe_file
from flatout.report.page import page, sentence
from flatout.report.proven import ProvenReport, runs_by

DANGER = Finding(
    "danger", "validates without eval()", "do", name="eval_missing", where="train.py:120"
)


def shown(given, dangers=(DANGER,), width=80, recipe="flatout.toml", budget_s=0.0):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    seen = Verdict([Observation(["train.py"])], {}, None, list(dangers), [], [])
    what = ["train.py", "--name", "a b"]
    console.print(ProvenReport(given, seen, 151.0, what, recipe, budget_s), crop=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_what_was_proven_comes_first_and_what_to_do_last():
    text = shown(prescription(), width=100)
    begins = (
        "[2:31] PROVEN  (A/A noise ±0.9%)\n",
        " 1 workers 0 to 6      2.31x [2.26,2.36] same samples, redrawn\n",
        " 2 bf16, channels_last 1.19x [1.17,1.21] same samples, rounding: 0.1% apart on average",
        "   1+2 together        3.40x [3.33,3.47]",
        "left alone    numbers read when they are used: 1.01x, noise\n",
        "              torch.compile: 1.08x, 41 s of set-up repay after 4,600 steps; you run 1,950",
        "needs your OK DCT-scaled decode",
        "not tried     samples cached in memory: no time was left\n",
        "DANGER        train.py:120 validates without eval()\n",
        "refused       sends to example.org (save.py:9)\n",
        "1,950 steps: 13m23s → 4m01s, warm-up included\n",
        "next  flatout run --recipe flatout.toml train.py --name 'a b'\n",
        "      flatout doctor --yes --budget 5m train.py --name 'a b'   # with more time\n",
        "      flatout doctor --yes --allow redrawn train.py",
    )
    places = [text.find(begin) for begin in begins]
    assert -1 not in places, text
    assert places == sorted(places)


@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_is_cut(width):
    text = shown(prescription(), width=width)
    for figure in ("2.31x [2.26,2.36]", "1.19x [1.17,1.21]", "3.40x [3.33,3.47]"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


@pytest.mark.parametrize("width", [40, 80])
def test_a_command_is_one_line_however_long(width):
    text = shown(prescription(), width=width)
    assert "      flatout doctor --yes --budget 5m train.py --name 'a b'   # with more time" in (
        text.splitlines()
    )


def test_changes_of_code_are_a_diff_and_no_recipe():
    given = prescription(proofs=[CODE], together=None, before_s=None)
    danger = dataclasses.replace(DANGER, edits=(Edit("train.py", 120, "", "model.eval()"),))
    text = shown(given, [danger], recipe=None)
    assert "flatout run --recipe" not in text
    command = "flatout doctor --yes --diff train.py --name 'a b' | patch -p1"
    assert f"{command} # train.py:120, train.py:88" in " ".join(text.split())
    assert "a step: 412 ms → 317 ms" in text
    between = dataclasses.replace(given, step_before_s=0.5, step_after_s=0.405)
    text = " ".join(shown(between, [danger], recipe=None).split())
    assert "a step with its share of evaluation and saving: 500 ms → 405 ms" in text
    assert recipe_file.as_recipe(given, ["train.py"]) is None


def test_nothing_to_prescribe_is_a_verdict_too():
    text = shown(
        prescription(proofs=[ITEM], together=None, before_s=None, refused=[]), [], recipe=None
    )
    assert "NOTHING TO PRESCRIBE: leave it as it is" in text
    assert "next" not in text
    text = shown(
        Prescription([UNTRIED], stopped="the script failed", seconds=60.0), [], recipe=None
    )
    assert "NOTHING PROVEN" in text
    assert "stopped       the script failed" in text
    assert "next" not in text
    late = Prescription([UNTRIED], stopped="no step in the time given", seconds=60.0)
    assert "next  flatout doctor --yes --budget 2m train.py" in shown(late, [], recipe=None)
    # What was given did not suffice, also where less of it was used.
    assert "--yes --budget 8m train.py" in shown(late, [], recipe=None, budget_s=240.0)


def test_cures_without_time_leave_the_question_open():
    given = prescription(proofs=[ITEM, UNTRIED], together=None, before_s=None, refused=[])
    text = shown(given, [], recipe=None)
    assert "NOTHING PROVEN YET: 1 cure not tried" in text
    assert "leave it as it is" not in text
    assert "flatout doctor --yes --budget 5m train.py" in text
    said = sentence({"prescription": given.as_dict(), "observations": []})
    assert said == "Nothing is proven yet: 1 change had no time to be tried."


def test_what_wins_only_beside_others_says_so():
    beside = dataclasses.replace(
        BF16, trial=trial(0.98), loss="", reason="beside workers 0 to 6: 1.40x [1.38,1.42]"
    )
    text = shown(prescription(proofs=[WORKERS, beside]), width=120)
    assert (
        "2 bf16, channels_last 0.98x [0.96,1.00] same samples, rounding; beside workers 0 to 6"
    ) in text


def test_the_recipe_holds_what_was_proven_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = recipe_file.place(None)
    assert recipe_file.write(path, prescription(), ["train.py", "--name", "a b"])
    found = load("flatout.toml")
    assert found.proven_for == "train.py --name 'a b'"
    assert found.request().named() == {
        "compute.precision": "bf16",
        "compute.memory_format": "channels_last",
        "input.workers": 6,
    }
    workers = found.choices["input.workers"]
    assert (workers.reason, workers.parity) == ("workers 0 to 6", Parity.REDRAWN)
    assert (workers.ratio, workers.floor) == (2.31, 0.009)
    assert workers.low == pytest.approx(2.2638)
    assert found.machine["cpus"]
    monkeypatch.setenv("FLATOUT_RECIPE", "flatout.toml")
    assert effective().named() == found.request().named()


def test_a_file_of_the_users_own_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = prescription(proofs=[WORKERS], together=None)
    recipe_file.write(recipe_file.place(None), given, ["train.py"])
    assert recipe_file.place(None).name == "flatout.toml"  # its own may be replaced
    own = "[input]\nworkers = 3\n"
    with open("flatout.toml", "w") as file:
        file.write(own)
    with pytest.raises(FlatoutError, match="not written by the doctor"):
        recipe_file.place(recipe_file.DEFAULT)
    assert recipe_file.place(recipe_file.DEFAULT, force=True) == recipe_file.DEFAULT
    path = recipe_file.place(None)
    assert path.name == "flatout.doctor.toml"
    recipe_file.write(path, given, ["train.py"])
    assert (tmp_path / "flatout.toml").read_text() == own
    os.unlink("flatout.doctor.toml")
    with open("flatout.doctor.toml", "w") as file:
        file.write(own)
    with pytest.raises(FlatoutError, match=r"flatout\.doctor\.toml"):
        recipe_file.place(None)


def test_a_page_shows_the_trials_of_a_prescription():
    known = plain_verdict()
    known["findings"].append(Finding("slow", "w", "d", name="item_each_step").as_dict())
    data = json.loads(json.dumps({**known, "prescription": prescription().as_dict()}))
    text = " ".join(page(data).split())
    for said in (
        "As it is: <b>13m23s</b>",
        "with what was proven: <b>4m01s</b>",
        "all 2 together",
        "3.40x [3.33, 3.47]",
        "left alone: 41 s of set-up repay after 4,600 steps",
        "needs your OK",
        'DCT-scaled decode</th> <td class="number neither">not measured',
        "<span>measured 1.01x [0.99, 1.03]</span>",
        "Refused in the trials: sends to example.org (save.py:9).",
    ):
        assert said in text, said
    assert sentence(data).startswith("With what was proven your whole run takes 4m01s instead of")
    short = prescription(before_s=None, after_s=None).as_dict()
    assert "a step is 3.40 times as fast" in sentence({**known, "prescription": short})
    late = prescription(proofs=[COMPILE], together=None, before_s=None).as_dict()
    assert "is worth it for this run: leave it" in sentence({"prescription": late})
    unmeasured = prescription(proofs=[DECODE], together=None, before_s=None).as_dict()
    assert "nothing is proven" in sentence({"prescription": unmeasured})


def test_ranks_of_torchrun_take_the_recipe_too():
    what = ["torchrun", "--nproc-per-node", "2", "train.py", "-x", "a b"]
    assert runs_by(Path("f.toml"), what) == (
        "FLATOUT_RECIPE=f.toml torchrun --nproc-per-node 2 -m flatout.cures.start train.py -x 'a b'"
    )
    assert runs_by(Path("f.toml"), ["-m", "jobs.train"]) == (
        "flatout run --recipe f.toml -m jobs.train"
    )
