"""A new verdict against a kept one: on made-up numbers whose truth is known."""

import json

import numpy as np
import pytest
from report_prescriptions import prescription
from report_verdicts import LANES, finding, observation, verdict

from flatout.errors import FlatoutError
from flatout.measure import block_length, ratio_of_medians
from flatout.measure.trial import bootstrap_ratio
from flatout.report.baseline import Baseline, compare

HERE = {"os": "Linux x86_64", "cpu": "made up", "cpus": 2, "gpus": ["A"], "torch": "2.13.0"}
ELSEWHERE = {**HERE, "cpu": "another"}


def steps(generator, count=200, *, resemblance=0.8, spread=0.08, between=0.0):
    """Step times as a busy machine gives them: alike when near each other, some far too long.

    `resemblance` is the correlation of neighbors, `between` how much whole runs differ.
    """
    noise = generator.normal(0, spread * np.sqrt(1 - resemblance**2), count + 50)
    for at in range(1, count + 50):
        noise[at] += resemblance * noise[at - 1]
    times = 50 * np.exp(noise[50:] + generator.normal(0, between))
    times[generator.random(count) < 0.03] *= 3
    return times


def measured(times, **other):
    of_rank = {"step_ms": list(times), "steps": len(times), "lanes_ms": LANES, **other}
    return verdict(findings=[], observations=[observation(**of_rank)])


def kept(times, **other):
    return Baseline.from_verdict(measured(times, **other), HERE)


def alarms(runs, seed, count, resemblance, *, slower=1.0, between=0.02):
    """In how many of the runs a comparison fails, where the truth is `slower`."""
    generator = np.random.default_rng(seed)
    failed = 0
    for _ in range(runs):
        before, after = (
            steps(generator, count, resemblance=resemblance, between=between) for _ in range(2)
        )
        found = compare(kept(before), measured(slower * after), HERE)
        failed += found.exit_code == 3
    return failed


def test_equal_runs_rarely_alarm():
    assert alarms(60, 0, 120, 0.8) <= 3


@pytest.mark.slow
@pytest.mark.parametrize(("count", "resemblance"), [(100, 0.95), (200, 0.0), (300, 0.8)])
def test_equal_runs_rarely_alarm_however_alike_neighbors_are(count, resemblance):
    assert alarms(100, 5, count, resemblance) <= 5


def test_a_slow_down_of_15_percent_is_found():
    generator = np.random.default_rng(1)
    for _ in range(8):
        one, other = (
            steps(generator, resemblance=0.5, spread=0.05, between=0.01) for _ in range(2)
        )
        found = compare(kept(one), measured(1.15 * other), HERE)
        assert found.slower
        assert found.ratio.low < found.ratio.mid < found.ratio.high
        assert found.ratio.mid == pytest.approx(1.15, abs=0.06)
        assert compare(kept(1.15 * other), measured(one), HERE).faster


@pytest.mark.slow
def test_without_blocks_the_interval_would_promise_too_much():
    generator = np.random.default_rng(2)
    blocks = singly = 0
    for _ in range(100):
        before, after = steps(generator), steps(generator)
        blocks += ratio_of_medians([before], after).low > 1
        singly += bootstrap_ratio(after, before).low > 1
    assert blocks <= 5
    assert singly > 10


def test_blocks_are_as_long_as_steps_resemble_each_other():
    generator = np.random.default_rng(3)
    lengths = [
        np.mean([block_length(steps(generator, 400, resemblance=r)) for _ in range(10)])
        for r in (0.0, 0.6, 0.9)
    ]
    assert lengths[0] < 4
    assert lengths[0] < lengths[1] < lengths[2]
    assert block_length([5.0] * 100) == block_length([1.0, 2.0]) == 1


def test_equal_numbers_have_the_ratio_1():
    assert ratio_of_medians([[5.0] * 50], [5.0] * 40) == (1, 1, 1)
    assert ratio_of_medians([[4.0] * 50, [9.0] * 50], [12.0] * 40).mid == pytest.approx(2)


def test_it_says_what_grew_by_lane():
    lanes = {**LANES, "input": 60.0, "host": 2.4, "backward": 20.0}
    times = np.full(100, 100.0)
    found = compare(kept(times), measured(1.2 * times, lanes_ms=lanes), HERE)
    assert found.exit_code == 3
    assert found.grew == {"input": (40.0, 60.0)}
    said = "\n".join(found.describe())
    assert "SLOWER  a step takes 1.20 times as long [1.20, 1.20], noise ±6%" in said
    assert "input grew from 40 to 60 ms per step" in said
    assert json.loads(json.dumps(found.as_dict()))["ratio"] == pytest.approx([1.2] * 3)


def test_a_new_torch_is_named_beside_a_slow_down():
    times = np.full(100, 100.0)
    found = compare(kept(times), measured(1.2 * times), {**HERE, "torch": "2.14.0"})
    assert "  may be the cause: torch 2.13.0 -> 2.14.0" in found.describe()


def test_on_another_machine_only_dangers_count():
    times = np.full(100, 100.0)
    slow = measured(2 * times)
    found = compare(kept(times), slow, ELSEWHERE)
    assert found.exit_code == 0
    assert found.ratio is None
    assert found.describe() == [
        "times were not compared: the baseline is of another machine (cpu made up -> another)"
    ]
    slow["findings"] = [finding("train mode", "danger", where="train.py:120")]
    assert compare(kept(times), slow, ELSEWHERE).exit_code == 3


@pytest.mark.parametrize(
    ("where", "known"),
    [("train.py:120", True), ("/ci/checkout/train.py:7", True), ("eval.py:120", False)],
)
def test_a_danger_is_known_wherever_its_line_moved(where, known):
    before = measured(np.full(100, 100.0))
    before["findings"] = [finding("train mode", "danger", where="train.py:120")]
    after = {**before, "findings": [finding("train mode", "danger", where=where), finding("item")]}
    found = compare(Baseline.from_verdict(before, HERE), after, HERE)
    assert found.exit_code == (0 if known else 3)
    assert found.new_dangers == ([] if known else [f"{where}: train mode was found"])


def test_a_second_danger_of_a_kind_is_new():
    danger = finding("train mode", "danger", where="train.py:1")
    before = {**measured(np.full(100, 100.0)), "findings": [danger]}
    after = {**before, "findings": [danger, {**danger, "where": "train.py:9"}]}
    assert compare(Baseline.from_verdict(before, HERE), after, HERE).exit_code == 3
    assert compare(Baseline.from_verdict(after, HERE), before, HERE).exit_code == 0


@pytest.mark.parametrize(
    ("new", "why", "code"),
    [
        ({"step_ms": [100.0] * 20}, "18 steps after the warm-up are too few", 0),
        ({"device": "cuda:0"}, "on cuda:0 now, on cpu in the baseline", 0),
        ({"step_ms": [], "steps": 0, "ended": "no steps"}, "no training step was seen", 3),
        ({"ended": "failed", "error": "Trace\nOops: here"}, "the script failed: Oops: here", 3),
    ],
)
def test_what_cannot_be_compared_says_why(new, why, code):
    before = kept(np.full(100, 100.0))
    found = compare(before, measured(np.full(100, 100.0), **new), HERE)
    assert found.exit_code == code
    assert why in " ".join(found.describe())
    assert found.ratio is None
    if "device" not in new:
        with pytest.raises(FlatoutError, match=why.partition(":")[0]):
            Baseline.from_verdict(measured(np.full(100, 100.0), **new), HERE)


def test_the_slowest_rank_stands_for_the_job():
    times = np.full(100, 100.0)
    both = verdict(findings=[], observations=[observation(0, step_ms=list(times)), observation(1)])
    slower = verdict(
        findings=[],
        observations=[observation(0), observation(1, step_ms=list(1.3 * times))],
    )
    found = compare(Baseline.from_verdict(both, HERE), slower, HERE)
    assert found.ratio.mid == pytest.approx(1.3)
    assert compare(kept(times), both, HERE).not_compared == "2 ranks now, 1 in the baseline"


def test_it_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "baseline.json"
    generator = np.random.default_rng(4)
    before = Baseline.from_verdict(
        verdict(observations=[observation(step_ms=list(steps(generator)))]), HERE
    )
    before.write(file)
    assert Baseline.read(file) == before
    assert list(tmp_path.iterdir()) == [file]
    assert before.dangers == [("train mode", "train.py")]


def test_a_baseline_that_is_none_is_named(tmp_path):
    file = tmp_path / "baseline.json"
    with pytest.raises(FlatoutError, match="cannot read the baseline"):
        Baseline.read(file)
    for text in ("{", "{}", json.dumps({"command": "", "machine": {}, "dangers": [], "run": {}})):
        file.write_text(text)
        with pytest.raises(FlatoutError, match="baseline") as told:
            Baseline.read(file)
        assert told.value.where == str(file)
    with pytest.raises(FlatoutError, match="cannot write"):
        kept(np.full(100, 100.0)).write(tmp_path / "absent" / "baseline.json")


def test_what_was_proven_is_remembered_until_it_is_in_use(tmp_path):
    times = steps(np.random.default_rng(11))
    proven = {**measured(times), "prescription": prescription().as_dict()}
    Baseline.from_verdict(proven, HERE).write(tmp_path / "b.json")
    before = Baseline.read(tmp_path / "b.json")
    low, middle, high = before.proven
    assert low < middle == 3.4 < high
    as_before = compare(before, measured(times), HERE).describe()
    assert as_before[-1].startswith("not in use")
    assert "3.40 times as fast" in as_before[-1]
    assert "not in use" not in " ".join(compare(before, measured(times / 3), HERE).describe())
