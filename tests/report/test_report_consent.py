"""What is said before trials: how many, for how long, and what a script cannot do in them."""

import io
from pathlib import Path

import pytest

from flatout.doctor.first_look import FirstLook
from flatout.doctor.proving.cure import Cure
from flatout.report.consent import terms
from flatout.report.session import Asked, _agreed
from flatout.terminal import Console

SCRIPT = """
import boto3, wandb
wandb.init()
client = boto3.client("s3")
model.push_to_hub("me/model")
"""


@pytest.fixture
def what(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return ["train.py", "--fast"]


def told(what, refused=(), seconds=120.0, **other):
    cures = [Cure(("a",), "a", others=(Cure(("a",), "b"),)), Cure(("c",), "c")]
    return terms(what, FirstLook([], 0, [], 9.0, refused=list(refused)), cures, seconds, **other)


def test_places_that_would_send_are_told_by_whether_they_were_met(what, tmp_path):
    met = {"kind": "network", "what": "sends", "where": f"{tmp_path}/train.py:4"}
    count, offline, refused, ahead = told(what, [met])
    assert count == "2 cures to prove: about 6 short reruns in a scratch copy, 2m00s at most."
    assert offline == "Offline during trials: Weights & Biases."
    assert refused == "Refused, as it was in the first look: uses AWS (train.py:4)."
    assert ahead.startswith("Not reached so far, and refused if it is: uploads to the Hugging Face")
    assert ahead.endswith("(train.py:5).")


def test_a_script_that_sends_nothing_needs_no_words(what, tmp_path):
    (tmp_path / "train.py").write_text("print(1)")
    assert told(what, seconds=45.0) == [
        "2 cures to prove: about 6 short reruns in a scratch copy, 45s at most."
    ]
    (line,) = told(what, whole_runs=6)
    assert line.endswith("2m00s at most; then 6 whole runs, where one is proven.")


def test_what_is_not_contained_here_is_told_before_the_question(what, tmp_path):
    (tmp_path / "train.py").write_text("print(1)")
    look = FirstLook([], 0, [], 9.0, held="python", lacks=["signals", "orphans", "network"])
    _, line = terms(what, look, [Cure(("a",), "a")], 45.0)
    assert line == (
        "Not contained here: native code and programs that it starts can write to your files; "
        "it can signal your other processes; "
        "a program that it starts can outlive a trial that is killed; "
        "native code and programs that it starts can reach other machines."
    )
    look = FirstLook([], 0, [], 9.0, held="overlay", lacks=["ranks"])
    _, line = terms(what, look, [Cure(("a",), "a")], 45.0)
    assert line.startswith("Not contained here: native code")
    assert line.endswith("as its ranks do.")


def test_after_a_look_in_place_it_is_tried_what_contains_trials(what):
    """By ranks that meet elsewhere: they keep the network, whatever the kernel can do."""
    console = Console(file=io.StringIO(), width=1000)
    asked = Asked(["torchrun", "--rdzv-endpoint=198.51.100.1", "train.py"], Path("x"), proves=True)
    assert _agreed(asked, FirstLook([], 0, [], 9.0), [Cure(("a",), "a")], console)
    assert "can reach other machines, as its ranks do." in console.file.getvalue()


def test_modules_and_ranks_are_read_too(what, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(SCRIPT)
    assert "package/__main__.py:5" in " ".join(told(["-m", "package", "-x"]))
    assert "train.py:5" in " ".join(told(["torchrun", "--nproc-per-node", "2", "train.py"]))
    assert len(told(["-m", "os"])) == 1
