"""Runs against each other: on made-up ones whose truth is known, and on what is damaged."""

import json
import shutil
from dataclasses import replace

import pytest
from report_runs import LANES_MS, make_run, profile

from flatout.errors import FlatoutError
from flatout.report import Report
from made_up_profiles import CPU_HOST


def compare(*folders):
    return Report([str(folder) for folder in folders])


def pair(*folders):
    return compare(*folders).comparison.pairs[0]


def test_a_run_that_is_slower_is_told_with_what_moved_and_what_differs(tmp_path):
    a = make_run(tmp_path / "a")
    sync = LANES_MS | {"sync": 37.0}
    made = profile(tmp_path / "b", ms=71.0, seed=1, lanes=sync)
    made = replace(
        made,
        recipe={
            **made.recipe,
            "values": {**made.recipe["values"], "world.reduction": "all_reduce"},
        },
        versions={**made.versions, "torch": "2.14.0"},
        data={**made.data, "files": 5, "digest": "d2"},
    )
    found = pair(a, make_run(tmp_path / "b", made))
    assert found.is_slower
    assert not found.is_faster
    assert found.ratio.low < 71 / 40 < found.ratio.high
    assert found.verdict.startswith("77")
    assert "% slower [" in found.verdict
    assert "(noise 6%)" in found.verdict
    assert found.lanes == {"sync": (6, 37)}
    text = "\n".join(found.lines())
    assert "sync +31 ms (6 -> 37)" in text
    assert "world.reduction shared -> all_reduce" in text
    assert "torch 2.13.0 -> 2.14.0" in text
    assert "3 files more" in text
    assert "loss, accuracy: other data" in text
    assert "val_loss" in found.figures
    assert max(map(len, found.lines())) <= 80


def test_what_noise_may_do_is_no_change(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", ms=41.0, seed=1)
    found = pair(a, b)
    assert not found.is_slower
    assert found.verdict.startswith("as fast, as far as noise lets one see: 2")
    assert not found.not_comparable
    assert pair(b, a).verdict.count("faster [") == 1


def test_faster_is_said_as_such_and_twice_as_a_factor(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", ms=30.0)
    assert pair(a, b).is_faster
    assert pair(a, b).verdict.startswith("33% faster [")
    c = make_run(tmp_path / "elsewhere" / "c", ms=120.0)
    assert pair(a, c).verdict.startswith("takes 3.00 times as long [")
    assert compare(a, c).fails("slower=5%")[0].startswith("elsewhere/c takes 3.00 times as long [")
    assert pair(c, a).verdict.startswith("3.00 times as fast [")


def test_batches_of_another_size_are_compared_by_the_sample(tmp_path):
    a = make_run(tmp_path / "a")
    made = profile(ms=80.0, lanes={lane: 2 * ms for lane, ms in LANES_MS.items()})
    b = make_run(tmp_path / "b", replace(made, steps=replace(made.steps, batch_size=128.0)))
    found = pair(a, b)
    assert found.ratio.mid == pytest.approx(1, rel=1e-3)
    assert found.lanes == {}
    assert "batch 64.0 -> 128.0" in found.job


def test_noise_is_measured_where_runs_of_the_same_settings_lie_beside(tmp_path):
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", replace(profile(ms=41.5, seed=9), versions={"torch": "2.14"}))
    for number, ms in enumerate((40.1, 39.9, 40.05)):
        make_run(tmp_path / f"again{number}", ms=ms, seed=number + 2)
    found = pair(a, b)
    assert found.noise < 0.02
    assert found.noise_of == "4 runs with the first one's settings beside it"
    assert found.is_slower
    # A fifth that is far off says that this machine is not calm.
    make_run(tmp_path / "again4", ms=52.0)
    assert pair(a, b).noise > 0.15


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"epochs": profile().epochs[:1]}, "other epochs (2, 1)"),
        ({"job": {**profile().job, "loss": "mse"}}, "other loss"),
        ({"model": {**profile().model, "parameters": 7}}, "speed: other models (Net of 1.2M"),
        ({"steps": replace(profile().steps, step_ms=[40.0] * 5)}, "b has 5 steady steps, too few"),
        ({"state": "failed", "error": "no"}, "b failed at step 400: no"),
    ],
)
def test_what_cannot_be_compared_is_told_with_its_reason(tmp_path, change, why):
    a = make_run(tmp_path / "a", log=False)
    b = make_run(tmp_path / "b", replace(profile(), **change), log=False)
    assert any(why in line for line in pair(a, b).not_comparable), pair(a, b).not_comparable


def test_other_work_on_the_machine_is_told_beside_the_verdict(tmp_path):
    made = profile()
    (rank,) = made.ranks
    use = {**rank.use, "machine": [0.5, 0.7, 0.6], "cpus": [0.5, 0.7, 0.6]}
    busy = replace(rank, use=use, machine={**rank.machine, "cpus": 4, "cpus_total": 4})
    a = make_run(tmp_path / "a")
    found = pair(a, make_run(tmp_path / "b", replace(made, ranks=[busy])))
    assert found.busy == ["b: other work kept 1.8 of 4 CPUs busy"]
    assert "  busy      b: other work kept 1.8 of 4 CPUs busy" in found.lines()
    # Another rank of the same host is no other work, and CPUs that it may not use do not matter.
    both = [replace(busy, use={**use, "cpus": [1.2] * 3}), replace(busy, rank=1)]
    assert pair(a, make_run(tmp_path / "c", replace(made, ranks=both))).busy == []
    part = replace(busy, machine={**busy.machine, "cpus": 2})
    assert pair(a, make_run(tmp_path / "d", replace(made, ranks=[part]))).busy == []


def test_another_machine_is_named_and_no_limit_is_judged_by_it(tmp_path):
    made = profile(ms=80.0)
    rank = replace(made.ranks[0], machine={**CPU_HOST, "cpu": "another"})
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", replace(made, ranks=[rank]))
    assert pair(a, b).machine == ["cpu made up -> another"]
    with pytest.raises(FlatoutError, match="of another machine"):
        compare(a, b).fails("slower=5%")


def test_a_limit_fails_only_where_the_whole_interval_lies_beyond(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", ms=44.0, seed=1)
    (line,) = compare(a, b).fails("slower=5%")
    assert line.startswith("b is ")
    assert line.endswith("allowed were 5%")
    assert compare(a, b).fails("slower=10%") == []
    assert compare(b, a).fails("slower=0%") == []
    for wrong in ("slower", "slower=5", "faster=5%", "slower=x%", "slower=nan%", "slower=-1%"):
        with pytest.raises(FlatoutError, match="expected slower=PERCENT"):
            compare(a, b).fails(wrong)
    with pytest.raises(FlatoutError, match="one was named"):
        compare(a).fails("slower=5%")


def test_a_run_that_was_killed_is_compared_by_what_is_there(tmp_path):
    a = make_run(tmp_path / "a")
    killed = make_run(tmp_path / "b", profile(ms=50.0, state="running"), ended=False)
    (tmp_path / "b" / "runs.jsonl").unlink()
    found = pair(a, killed)
    assert found.is_slower
    assert "b was killed; its Profile is as of step 400" in found.not_comparable
    # Before it had written one, its log tells.
    (tmp_path / "b" / "profile.json").unlink()
    (tmp_path / "b" / "history.json").write_text('{"batch_size": 64, "steps": 1}')
    with (tmp_path / "b" / "log.jsonl").open("a") as log:
        log.writelines(
            json.dumps({"kind": "step", "step": 400 + n, "samples_per_s": 800.0}) + "\n"
            for n in range(40)
        )
    found = pair(a, killed)
    assert found.ratio.mid == pytest.approx(2, rel=0.01)
    assert any("has no Profile" in line for line in found.not_comparable)


def test_names_that_lead_nowhere_and_twice_to_one_run(tmp_path):
    a = make_run(tmp_path / "a")
    with pytest.raises(FlatoutError, match="expected the folder of a run, found none"):
        compare(a, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FlatoutError, match="holds nothing of a run"):
        compare(tmp_path / "empty")
    (tmp_path / "link").symlink_to(a)
    with pytest.raises(FlatoutError, match="a run was named twice"):
        compare(a, tmp_path / "link")


def test_a_profile_of_another_version_is_told_and_the_rest_is_read(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    file = b / "profile.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 2', 1))
    text = "\n".join(compare(a, b).lines())
    assert "the Profile is of version 2, and this Flatout reads version 1" in text
    assert "Recipe, machine, versions and data: there are not two Profiles" in text
    assert compare(b).lines()[0].startswith("The run has no Profile")


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    a = make_run(tmp_path / "a")
    with (a / "log.jsonl").open("a") as log:
        log.write('{"kind": "st\nnonsense\n[]\n{"kind": "step", "step')
    assert compare(a).lines()[-1].endswith("lines that are no JSON were left out (3)")
    (a / "history.json").write_text("{")
    shutil.rmtree(a / "checkpoints", ignore_errors=True)
    assert any("history.json cannot be read" in line for line in compare(a).lines())


def test_json_has_the_same_and_is_finite(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", ms=60.0)
    found = json.loads(json.dumps(compare(a, b).as_dict(), allow_nan=False))
    (one,) = found["runs"]
    assert one["slower"]
    assert one["ratio"][1] == pytest.approx(1.5, rel=1e-3)
    assert json.loads(json.dumps(compare(a).as_dict(), allow_nan=False))["state"] == "ended"
