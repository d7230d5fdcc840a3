"""What the doctor's answers come to: made-up answers, judged as real ones are."""

import argparse
import json
import sys
from dataclasses import replace

import psutil
import pytest
from rich.text import Text

import doctor
import remeasure
import screens
from doctor import (
    Answer,
    Asked,
    Seen,
    answer_of,
    ask,
    ask_all,
    ask_one,
    busy_keys_of,
    keys_of,
    take_kept,
    words_of,
)
from flatout.devices import inventory
from flatout.doctor.finding import Edit
from flatout.doctor.judge import judge
from flatout.doctor.prescription import Prescription, Proof
from flatout.measure import TrialResult
from flatout.observe import Ablation, LeftOut, Observation, Site
from flatout.report.first_look import MOST_LINES, FirstLookReport
from pitfalls import Pitfall, read_index
from remeasure import Remeasured

PITFALLS = {pitfall.name: pitfall for pitfall in read_index()}
SLOW = PITFALLS["workers_zero"]
DANGER = PITFALLS["eval_missing"]
FREE = PITFALLS["item_each_step"]


def finding(pitfall, **changes):
    where = f"{pitfall.script}:{min(pitfall.marked)}"
    kind = "danger" if pitfall.danger else "slow"
    found = {"name": pitfall.checks[0], "kind": kind, "where": where}
    return {**found, **changes}


def trial(ratio):
    return TrialResult(ratio, ratio - 0.1, ratio + 0.1, 0.01, 4, 0.2, 0.2 / ratio, 9.0)


def prescription(*names, ratio=2.0, left_alone=()):
    """As the doctor's JSON has it."""
    proofs = [Proof((n,), n, outcome="prescribed", trial=trial(ratio)) for n in names]
    proofs += [Proof((n,), n, outcome="left alone", trial=trial(1.0)) for n in left_alone]
    recipe = {"input.workers": 2}
    together = Proof(names, "both", recipe, outcome="prescribed", trial=trial(ratio))
    found = Prescription(proofs, together if names else None, 0.01, 60.0)
    return json.loads(json.dumps(found.as_dict()))


def tried(pitfall, *names, **given):
    """An answer that prescribes a cure for each of these findings."""
    found = [finding(pitfall, name=name) for name in names]
    return Answer(found, prescription=prescription(*(one["name"] for one in found), **given))


def seen(pitfall, script=(), clean=(), reason=""):
    return Seen(pitfall, reason, [Answer([one]) for one in script], [Answer([o]) for o in clean])


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
    assert found["trial_error"].met is False
    assert found["named_in_clean"].value == 1


def test_what_is_prescribed_for_a_clean_script_is_wrong_unless_it_has_the_pitfall():
    row = seen(PITFALLS["channels_first"])
    row.clean = [tried(SLOW, "fp32_slow", "optimizer_unfused")]
    assert row.prescribed_wrongly == ["optimizer_unfused"]
    assert keys(row)["false_prescriptions"].value == 1
    assert "wrongly prescribed: optimizer_unfused" in words_of(row)


def test_what_makes_a_clean_scripts_whole_runs_faster_is_not_wrong():
    row = seen(SLOW)
    row.clean = [tried(SLOW, "fp32_slow", ratio=2.0)]
    assert row.prescribed_wrongly == ["fp32_slow"]
    row.clean = [replace(row.clean[0], again=Remeasured(1.1, low=0.98, high=1.2))]
    assert row.prescribed_wrongly == ["fp32_slow"]
    row.clean = [replace(row.clean[0], again=Remeasured(1.9, low=1.8, high=2.0))]
    assert row.prescribed_wrongly == []
    assert keys(row)["false_prescriptions"].met
    assert keys(row)["trial_error"].value == pytest.approx(2 / 1.9 - 1)
    assert "clean, fp32_slow: promised 2.00x, again 1.90x (1.80 to 2.00)" in words_of(row)


def test_what_is_prescribed_beside_other_work_has_its_own_key():
    row = seen(PITFALLS["channels_first"])

    def wrong():
        return busy_keys_of([row])[0]

    row.busy = [Answer(prescription=prescription(left_alone=["x"]))]
    assert wrong().met
    assert words_of(row) == "prescribed nothing"
    row.busy = [tried(SLOW, "fp32_slow", "optimizer_unfused")]
    assert wrong().value == 1
    assert "prescribed fp32_slow, optimizer_unfused" in words_of(row)
    assert "wrongly prescribed beside other work: optimizer_unfused" in words_of(row)
    row.busy = [replace(row.busy[0], again=Remeasured(1.9, low=1.8, high=2.0))]
    assert wrong().met
    row.busy = [Answer()]
    assert wrong().value is None
    row.busy = [Answer(is_one=False)]
    assert wrong().value is None


def test_beside_other_work_clean_scripts_alone_are_shown(monkeypatch):
    asked_about, others = [], set(psutil.Process().children())

    def ask(script, ranks, asked):
        asked_about.append((script, len({*psutil.Process().children()} - others)))
        return Answer()

    monkeypatch.setattr("doctor.ask", ask)
    row = Seen(SLOW, "")
    ask_one(row, Asked(busy=2))
    (script, beside) = asked_about.pop()
    assert script != SLOW.script
    assert beside == 2
    assert (len(row.script), len(row.clean), len(row.busy)) == (0, 0, 1)
    ask_one(row, Asked())
    assert [beside for _, beside in asked_about] == [0, 0]


def test_what_was_tried_and_left_alone_is_not_prescribed():
    row = seen(SLOW)
    row.clean = [Answer([finding(SLOW)], prescription=prescription(left_alone=["x"]))]
    found = keys(row)
    assert found["false_prescriptions"].met
    assert found["false_prescriptions"].note == "1 of 1 looks tried"


def test_what_costs_nothing_must_not_be_prescribed():
    row = seen(FREE)
    row.script = [tried(FREE, *FREE.checks, "threads_too_many")]
    assert row.prescribed_wrongly == ["item_each_step", "threads_too_many"]
    assert keys(row)["recall"].value is None
    slow = seen(SLOW)
    slow.script = [tried(SLOW, *SLOW.checks, "threads_too_many")]
    assert slow.prescribed_wrongly == []


def test_what_was_promised_is_held_against_what_whole_runs_say():
    rows = [seen(SLOW), seen(SLOW), seen(DANGER)]
    for row, ratio in zip(rows, (1.9, 2.2, None), strict=True):
        again = Remeasured(ratio, reason="" if ratio else "exit code 1: no")
        row.script = [replace(tried(SLOW, "workers_zero", ratio=2.0), again=again)]
    assert rows[0].script[0].trial_error == pytest.approx(2 / 1.9 - 1)
    error = keys(*rows)["trial_error"]
    assert error.value == pytest.approx((2 / 1.9 - 1 + 1 - 2 / 2.2) / 2)
    assert error.met is False
    assert error.note == "of 2 scripts"
    assert "promised 2.00x, again 1.90x" in words_of(rows[0])
    assert "again not measured (exit code 1: no)" in words_of(rows[2])


def test_what_is_promised_of_a_step_counts_with_what_lies_between_steps():
    answer = tried(SLOW, "workers_zero", ratio=2.0)
    assert answer.predicted == 2.0
    # Of the whole run it is less, as its start and its end are in that.
    answer.prescription.update(step_before_s=0.9, step_after_s=0.5, before_s=90.0, after_s=60.0)
    assert answer.predicted == pytest.approx(1.8)
    assert replace(answer, again=Remeasured(1.8)).trial_error == pytest.approx(0.0)


def test_why_there_was_no_trial_is_said():
    given = {**prescription(), "stopped": "no first step in the time given"}
    row = seen(SLOW)
    row.script = [Answer([finding(SLOW)], prescription=given)]
    assert words_of(row) == "named; no trial: no first step in the time given"


def test_what_costs_no_time_may_have_to_be_named_all_the_same():
    row = PITFALLS["batch_too_small"]
    assert not row.prescribe
    assert keys(seen(row, [finding(row)]))["recall"].met
    assert words_of(Seen(row, "", [Answer()], [Answer()])) == "MISSED"


def test_a_danger_in_a_clean_script_is_false():
    row = seen(SLOW, [finding(SLOW)], [finding(DANGER)])
    assert keys(row)["false_dangers"].met is False
    assert "false danger: eval_missing" in words_of(row)


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


def test_a_run_has_as_many_epochs_as_take_so_long(monkeypatch):
    told = {"as_it_is": lambda epochs: [0.5 * epoch for epoch in range(epochs)]}
    monkeypatch.setattr(doctor, "as_it_is", lambda script, folder, ranks: told["as_it_is"])
    assert doctor._epochs(SLOW.script, 1, 60) == ["--epochs", "122"]
    told["as_it_is"] = lambda epochs: []
    assert doctor._epochs(SLOW.script, 1, 60) == []


def test_a_doctor_that_says_nothing_is_ended(monkeypatch):
    sleep = "import time; print('here', flush=True); time.sleep(100)"
    monkeypatch.setattr(doctor, "FLATOUT", [sys.executable, "-c", sleep])
    monkeypatch.setattr(doctor, "GRACE_S", 0.5)
    assert ask(SLOW.script, 1, Asked(seconds=0, budget=0)).reason == "no answer in 0 s"


def test_only_what_was_asked_for_is_run():
    rows = ask_all([SLOW, Pitfall("a", "b", "c", ("a",))], Asked(), only=["other"])
    assert {row.reason for row in rows} == {"left out by --only"}


def test_what_was_answered_is_kept_and_not_asked_again(monkeypatch, tmp_path):
    shown = []

    def answer(script, ranks, asked):
        shown.append((script, script.read_text()))
        return tried(SLOW, *SLOW.checks)

    monkeypatch.setattr(doctor, "ask", answer)
    rows, asked = [SLOW, DANGER, FREE], Asked(remeasure=0)
    parts = [ask_all(rows, asked, shard=(k, 2), keep=tmp_path) for k in (1, 2)]
    assert [row.reason for row in parts[0]] == ["", "left out by --shard", ""]
    assert [row.reason for row in parts[1]] == ["", "", ""]
    assert [script for script, _ in shown][::2] == [SLOW.script, FREE.script, DANGER.script]
    for place, row in enumerate((SLOW, FREE, DANGER)):
        clean = row.write_clean(tmp_path)
        assert shown[2 * place + 1][0].name == clean.name
        assert shown[2 * place + 1][1] == clean.read_text() != row.script.read_text()
    shown.clear()
    again = ask_all(rows, asked, keep=tmp_path)
    assert not shown
    assert [row.script for row in again] == [row.script for row in parts[1]]
    # Asked in another way, it is another answer.
    assert not take_kept(tmp_path / "workers_zero.json", seen(SLOW), Asked(budget=1))


def test_a_row_without_an_answer_is_asked_again(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "ask", lambda *given: Answer(reason="no", is_one=False))
    ask_all([SLOW], Asked(), keep=tmp_path)
    assert not take_kept(tmp_path / "workers_zero.json", seen(SLOW), Asked())


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/"])
def test_a_shard_is_a_part_of_the_rows(text):
    assert doctor.shard_of("2/2") == (2, 2)
    with pytest.raises(argparse.ArgumentTypeError, match="is not K/N"):
        doctor.shard_of(text)


# -- whole runs ----------------------------------------------------------------------------------

SCRIPT = """import sys, time
PAUSE = 0.3
for epoch in range(int(sys.argv[2])):
    print("epoch", epoch)
    time.sleep(PAUSE)
"""


def test_the_cured_copy_of_a_script_is_changed_as_prescribed(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(SCRIPT)
    edits = [
        Edit(str(script), 5, "    time.sleep(PAUSE)", ""),
        Edit(str(script), 2, "PAUSE = 0.3", ""),
    ]
    copy = remeasure._copied(script, tmp_path / "a", [vars(edit) for edit in edits])
    assert copy.read_text() == SCRIPT.replace("PAUSE = 0.3\n", "").replace(
        "    time.sleep(PAUSE)\n", ""
    )
    assert script.read_text() == SCRIPT
    wrong = vars(Edit(str(script), 2, "PAUSE = 3", ""))
    with pytest.raises(remeasure.NotMeasured, match=r"slow\.py:2 does not fit"):
        remeasure._copied(script, tmp_path / "b", [wrong])


def test_what_is_outside_of_epochs_drops_out():
    lengths = []

    def run(epochs):
        """The first epoch takes three seconds, each other a tenth."""
        lengths.append(epochs)
        return [8.0 + 0.1 * epoch for epoch in range(epochs)]

    epochs = remeasure.epochs_within(run, seconds=4)
    assert lengths == [4, 12]  # the first whose epochs take a second
    assert epochs == 42
    assert remeasure.epoch_s(run(epochs)) == pytest.approx(0.1)
    with pytest.raises(remeasure.NotMeasured, match="of 3 epochs that were told, too few"):
        remeasure.epoch_s([1.0, 2.0, 3.0])


def test_runs_that_a_cure_makes_short_have_more_epochs(monkeypatch, tmp_path):
    lengths = {"as it is": [], "cured": []}

    def run(side, each):
        def of(epochs):
            lengths[side].append(epochs)
            return [each * epoch for epoch in range(epochs)]

        return of

    monkeypatch.setattr(remeasure, "as_it_is", lambda *given: run("as it is", 3.0))
    monkeypatch.setattr(remeasure, "cured", lambda *given: run("cured", 0.01))
    found = remeasure.remeasure(tmp_path, 1, {"recipe": {}, "edits": []}, seconds=4)
    assert found.ratio == pytest.approx(300)
    assert found.epochs == 4
    assert (set(lengths["as it is"]), lengths["cured"][-1]) == ({4}, 102)


@pytest.mark.slow
@pytest.mark.long
def test_whole_runs_are_compared(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(SCRIPT)
    edit = vars(Edit(str(script), 2, "PAUSE = 0.3", "PAUSE = 0.15"))
    cures = {"recipe": {"process.threads": 1}, "edits": [edit]}
    found = remeasure.remeasure(script, 1, cures, seconds=1.2)
    assert found.reason == ""
    assert found.epochs == 6
    assert 0 < found.low <= found.ratio <= found.high
    script.write_text("import sys; sys.exit('it is broken')\n")
    assert remeasure.remeasure(script, 1, {"recipe": {}, "edits": []}, seconds=1) == Remeasured(
        reason="exit code 1: it is broken"
    )


def test_what_looks_say_of_themselves_is_summed_up_but_the_share_of_short_steps():
    row = seen(DANGER, [finding(DANGER)], [])
    row.script = [
        Answer([finding(DANGER)], added_us_per_step=8.0, explained=0.97, step_ms=2.0),
        Answer([finding(DANGER)], added_us_per_step=4.0, explained=0.8, step_ms=0.1),
    ]
    found = keys(row)
    assert (found["explained_least"].value, found["explained_least"].met) == (0.8, True)
    assert found["added_share_most"].value == pytest.approx(0.004)
    assert "lines_on_screen" not in found
    assert "first_look_s" not in found


def test_mistakes_without_a_word_are_dangers_and_some_that_cost_time():
    slow = PITFALLS["history_grows"]
    assert keys(seen(DANGER, [finding(DANGER)]), seen(slow))["silent_recall"].value == 0.5
    assert keys(seen(SLOW))["silent_recall"].value is None


def test_an_answer_has_the_time_of_its_look_and_the_lines_of_its_screens():
    ranks = [
        Observation(["train.py"], rank=0, world_size=2, added_us_per_step=3.0, step_ms=[1.0]),
        Observation(["train.py"], rank=1, world_size=2, added_us_per_step=5.0, step_ms=[4.0]),
    ]
    for rank in ranks:
        rank.steps, rank.explained, rank.start_s = 1, 0.9, 3.0 + rank.rank
        rank.lanes_ms = {"forward": 1.0}
        proven = Ablation(1.5, 1.4, 1.6, 0.02, 4, 6.0, 4.0)
        site = Site("a_folder/with/a_long/name/engine/tracker.py", 34)
        rank.left_out = [LeftOut(site, "self.tracker.log", proven)] * 12
    verdict = judge(ranks, inventory())
    said = verdict.as_dict() | {"seconds": 31.0, "held": "overlay", "lacks": []}
    answer = answer_of(json.dumps(said), "", 0)
    assert (answer.explained, answer.step_ms, answer.added_share) == (0.9, 4.0, 5.0 / 4000.0)
    assert answer.look_s == 27.0
    assert 5 < answer.lines <= MOST_LINES
    found = keys(Seen(DANGER, "", [answer], [Answer(lines=21, look_s=30.5)]))
    assert found["lines_on_screen"].value == 21
    assert found["lines_on_screen"].met is False
    assert found["lines_on_screen"].note == "eval_missing, clean; at 80 and 100 columns"
    assert (found["first_look_s"].value, found["first_look_s"].met) == (30.5, False)


def test_a_line_that_a_terminal_breaks_counts_as_several(monkeypatch):
    monkeypatch.setattr(
        FirstLookReport,
        "__rich_console__",
        lambda *_: [Text("x" * 90, no_wrap=True, overflow="ignore")],
    )
    report = FirstLookReport(judge([Observation(["a.py"])], inventory()), inventory(), 1.0, [])
    assert screens.screen(report, 80).count("\n") == 1
