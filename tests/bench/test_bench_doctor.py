"""What the doctor's answers come to: made-up answers, judged as real ones are."""

import json
import sys

import pytest

import doctor
from doctor import Answer, Seen, answer_of, ask, ask_all, keys_of, words_of
from pitfalls import Pitfall, read_index

PITFALLS = {pitfall.name: pitfall for pitfall in read_index()}
SLOW = PITFALLS["workers_zero"]
DANGER = PITFALLS["eval_missing"]
FREE = PITFALLS["item_each_step"]


def finding(pitfall, **changes):
    where = f"{pitfall.script}:{min(pitfall.marked)}"
    kind = "danger" if pitfall.danger else "slow"
    found = {"name": "x", "kind": kind, "number": pitfall.numbers[0], "where": where}
    return {**found, "proven": None, **changes}


def seen(pitfall, script=(), twin=(), reason=""):
    return Seen(pitfall, reason, [Answer([one]) for one in script], [Answer([o]) for o in twin])


def keys(*rows):
    return {key.name: key for key in keys_of(rows)}


def test_what_is_named_counts():
    found = keys(
        seen(SLOW, [finding(SLOW)]), seen(DANGER, [finding(DANGER)]), seen(FREE, [finding(FREE)])
    )
    assert found["recall"].value == found["danger_recall"].value == 1.0
    assert found["located"].value == 1.0
    assert found["false_dangers"].met


def test_what_is_not_named_each_time_is_missed():
    row = Seen(SLOW, "", [Answer([finding(SLOW)]), Answer()], [Answer(), Answer()])
    assert not row.is_named
    assert not keys(row)["recall"].met
    assert words_of(row) == "MISSED"


def test_a_danger_must_be_called_one():
    assert not seen(DANGER, [finding(DANGER, kind="note")]).is_named
    assert seen(SLOW, [finding(SLOW, kind="note")]).is_named


@pytest.mark.parametrize("where", ["", "workers_zero.py", "workers_zero.py:1", "other.py:{line}"])
def test_another_line_is_named_but_not_located(where):
    row = seen(SLOW, [finding(SLOW, where=where.format(line=min(SLOW.marked)))])
    assert row.is_named
    assert not row.is_located


def test_without_a_trial_prescriptions_are_not_measured():
    found = keys(seen(SLOW, [finding(SLOW)], [finding(SLOW)]))
    assert found["false_prescriptions"].met is False
    assert found["false_prescriptions"].value is None
    assert found["named_in_twins"].value == 1


def test_what_is_proven_of_a_twin_is_wrong_unless_the_twin_has_it():
    ratio = [1.1, 1.2, 1.3]
    row = seen(PITFALLS["channels_first"])
    row.twin = [Answer([finding(SLOW, number=n, proven=ratio)]) for n in (18, 47)]
    assert [one["number"] for one in row.prescribed_wrongly] == [47]
    assert keys(row)["false_prescriptions"].value == 1


def test_what_costs_nothing_must_not_be_prescribed():
    row = seen(FREE, [finding(FREE, proven=[1.0, 1.1, 1.2])])
    assert len(row.prescribed_wrongly) == 1
    assert keys(row)["recall"].value is None


def test_what_costs_no_time_may_have_to_be_named_all_the_same():
    row = PITFALLS["retained_graph"]
    assert not row.prescribe
    assert keys(seen(row, [finding(row)]))["recall"].met
    assert words_of(Seen(row, "", [Answer()], [Answer()])) == "MISSED"


def test_a_danger_in_a_twin_is_false():
    row = seen(SLOW, [finding(SLOW)], [finding(DANGER)])
    assert keys(row)["false_dangers"].met is False
    assert "false danger: x" in words_of(row)


def test_a_doctor_that_does_not_answer_meets_nothing():
    silent = Answer(reason="usage", is_one=False)
    found = keys(Seen(SLOW, "", [silent], [silent]))
    assert not any(key.met for key in found.values())
    assert found["false_dangers"].words.startswith("false_dangers not measured (2 looks without")


def test_rows_that_cannot_run_are_counted_apart():
    found = keys(seen(SLOW, reason="this machine lacks two_cpus"), seen(FREE, [finding(FREE)]))
    assert found["pitfalls"].value == 1
    assert found["pitfalls"].note == "1 not run"
    assert found["recall"].value is None
    assert found["recall"].met is False


def test_added_time_is_that_of_the_raw_loop():
    raw = Seen(PITFALLS[doctor.RAW_LOOP], "", [Answer()], [Answer(added_us_per_step=3.0)])
    other = Seen(SLOW, "", [Answer()], [Answer(added_us_per_step=9.0)])
    assert keys(raw, other)["added_us_per_step"].value == 3.0
    assert keys(other)["added_us_per_step"].met is False


def test_an_answer_that_is_no_json_is_a_reason():
    assert answer_of("", "usage: ...\nno such option\n", 2).reason == "no such option"
    assert answer_of("", "", -9).reason == "exit code -9"
    said = json.dumps({"findings": [], "error": "Traceback\nValueError: x"})
    assert answer_of(said, "", 1).reason == "ValueError: x"


def test_a_doctor_that_says_nothing_is_ended(monkeypatch):
    sleep = "import time; print('here', flush=True); time.sleep(100)"
    monkeypatch.setattr(doctor, "FLATOUT", [sys.executable, "-c", sleep])
    monkeypatch.setattr(doctor, "GRACE_S", 0.5)
    assert ask(SLOW.script, 1, 0).reason == "no answer in 0 s"


def test_only_what_was_asked_for_is_run():
    rows = ask_all([SLOW, Pitfall("a", (1,), "b", "c")], restarts=1, seconds=1, only=["other"])
    assert {row.reason for row in rows} == {"left out by --only"}
