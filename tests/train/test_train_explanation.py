"""Why a fit ran as it did, on made-up figures, and of a small fit."""

import pytest
from train_jobs import data, network, quiet

from flatout import Trainer
from flatout.errors import FlatoutError
from flatout.train.explanation import Explanation
from flatout.train.explanation_picture import draw
from flatout.train.tuning.tuner import _pace_words

BF16 = {"compute.precision": "bf16"}
BOTH = {**BF16, "compute.memory_format": "channels_last"}
RATES = {
    "flops_per_s": {
        f"{precision}/{layout}": {"conv": {"forward": rate, "backward": rate}}
        for precision, rate in (("fp32", 1e9), ("bf16", 4e9))
        for layout in ("contiguous", "channels_last")
    },
    "bytes_per_s": {p: {"memory": 1e9, "cache": 1e9} for p in ("fp32", "bf16")},
    "calls_per_s": 1e6,
    "nodes_per_s": 1e6,
    "spread": 1.1,
}


def of(**values):
    return {"calls": 0, "flops": 0, "bytes": 0, "cached_bytes": 0, **values}


def history(**changes):
    made = {
        "steps": 100,
        "lanes_ms": {"forward": 8.0, "backward": 11.0, "optimizer": 1.0},
        "steady_lanes_s": {"forward": 0.008, "backward": 0.02, "optimizer": 0.0019},
        "recipe": {
            "summary": "bf16",
            "values": {"compute.precision": "bf16", "compute.memory_format": "contiguous"},
            "reasons": {"compute.precision": "bf16 units are there"},
            "measured": {"compute.precision": "1.92x [1.88,1.97]"},
        },
        "tuning": {
            "done": True,
            "why": "",
            "before_first_step_s": 0.5,
            "lost_s": 0.25,
            "step_s": {"plain": 0.04, "chosen": 0.02},
            "spans": [
                {"first": 1, "last": 8, "settings": {}},
                {"first": 9, "last": 12, "settings": BOTH},
                {"first": 13, "last": 20, "settings": {}},
                {"first": 21, "last": 100, "settings": BF16},
            ],
            "trials": [
                {
                    "a": {},
                    "b": BOTH,
                    "first": 1,
                    "last": 20,
                    "ratio": 1.925,
                    "low": 1.88,
                    "high": 1.97,
                    "floor": 0.01,
                    "pairs": 3,
                    "chosen": "b",
                },
                {
                    "a": BF16,
                    "b": BOTH,
                    "first": 21,
                    "last": 40,
                    "ratio": 0.99,
                    "low": 0.97,
                    "high": 1.01,
                    "floor": 0.02,
                    "pairs": 2,
                    "chosen": "a",
                    "shape": "32 tokens",
                },
            ],
            "dropped": {"compute.rewrites": "would change the result"},
        },
        "roofline": {
            "device": "cpu",
            "threads": 2,
            "machine": "elsewhere",
            "rates": RATES,
            "samples": 64,
            "lanes": {
                "forward": {"conv": of(flops=16e6)},
                "backward": {"conv": of(flops=32e6), "elementwise": of(bytes=4e6)},
                "optimizer": {"elementwise": of(calls=2000)},
            },
            "weights": {"bytes": 0, "state_bytes": 0, "tensors": 2},
        },
    }
    return {**made, **changes}


def lines(**changes):
    found = Explanation.of(history(**changes)).lines("#", ".")
    assert all(len(line) <= 80 for line in found)
    return found


def test_what_was_tried_on_which_steps_and_what_it_cost():
    text = "\n".join(lines())
    assert "0.5s before the first step, 0.25s lost in slower steps" in text
    assert "30.0% of the" in text  # 0.75 of 0.5 + 100 x 0.02 s
    tried = next(line for line in lines() if line.startswith("  bf16 · channels_last  "))
    assert tried.split()[3:] == ["1.93x", "[1.88,1.97]", "±1.0%", "1-20", "kept"]
    assert "channels_last (with bf16) at 32 tokens" in text
    assert "0.99x [0.97,1.01]  ±2.0%  21-40 not kept" in text
    assert "compute.rewrites: would change the result" in text
    assert "plain: 16 steps (1-8, 13-20)" in text
    assert "bf16: 80 steps (21-100)" in text
    assert "compute.precision = bf16  1.92x [1.88,1.97]" in text
    assert "bf16 units are there" in text


def test_many_spans_of_the_same_settings_are_cut():
    spans = [{"first": n, "last": n, "settings": {} if n % 2 else BF16} for n in range(1, 41)]
    text = "\n".join(lines(tuning={**history()["tuning"], "spans": spans}))
    assert "plain: 20 steps (1, 3, 5, 7, …, 39)" in text


def test_a_search_that_ended_early_says_why():
    tuning = {**history()["tuning"], "done": False, "why": "the run is half over"}
    assert "  it ended early: the run is half over" in lines(tuning=tuning)
    assert lines(tuning=None)[0] == "tuning: nothing was measured on this run's steps"


def test_lanes_stand_against_their_limit_under_the_settings_that_ran():
    forward, backward, optimizer = Explanation.of(history()).lanes
    assert (forward.name, forward.took_s, forward.least_s) == ("forward", 0.008, 0.004)
    assert forward.share == 0.5
    assert backward.kinds == pytest.approx(
        {"conv": 0.008, "elementwise": 0.002, "dispatch": 0.0, "casts": 0.0}
    )
    assert optimizer.share == 1.0  # no more than all of it
    (line,) = (line for line in lines() if line.startswith("  forward"))
    assert line.split() == ["forward", "8", "ms", "4", "ms", "##########..........", "50%"]


def test_a_captured_step_stands_as_a_whole():
    recipe = {**history()["recipe"], "values": {"compute.capture": "on"}}
    took = {"forward": 0.06, "backward": 0.0, "optimizer": 0.0, "host": 0.001}
    (lane,) = Explanation.of(history(recipe=recipe, steady_lanes_s=took)).lanes
    assert (lane.name, lane.took_s) == ("step", 0.06)
    assert lane.least_s == pytest.approx(0.016 + 0.032 + 0.004 + 1e-6)
    found = lines(recipe=recipe, steady_lanes_s=took)
    assert any("one compiled graph, which is measured as a whole" in line for line in found)
    (line,) = (line for line in found if line.startswith("  step "))
    assert line.split()[1:3] == ["60", "ms"]
    assert any(line.startswith("  captured step ") for line in found)
    # Where steps ran eagerly after all, they have lanes.
    took["backward"] = 0.01
    assert len(Explanation.of(history(recipe=recipe, steady_lanes_s=took)).lanes) == 3


def test_what_settings_promise_is_relative_to_plain():
    promised = {words: gain for words, _, gain in Explanation.of(history()).possible_savings}
    assert list(promised) == [
        "plain",
        "fused optimizer",
        "bf16",
        "channels_last",
        "bf16 · channels_last",
    ]
    plain, bf16 = 0.016 + 0.032 + 0.004 + 0.002, 0.004 + 0.008 + 0.002 + 0.002
    assert promised["bf16"] == pytest.approx(plain / bf16)
    assert promised["channels_last"] == 1.0


def test_the_settings_that_ran_stand_among_those_that_promise():
    recipe = history()["recipe"]
    values = {**BF16, "compute.fused_optimizer": "on", "compute.compile": "off", "save.every": 3}
    found = Explanation.of(history(recipe={**recipe, "values": values}))
    assert [words for words, _, _ in found.possible_savings][-1] == "bf16 · fused optimizer"
    assert found.possible_savings[-1][1] == pytest.approx(sum(lane.least_s for lane in found.lanes))


def test_another_machine_and_a_compiled_model_have_no_roofline(tmp_path):
    counts = {**history()["roofline"], "rates": None}
    assert "on another machine" in "\n".join(lines(roofline=counts))
    counts = {**history()["roofline"], "step": 7}
    assert "  counted at step 7, when other layers began to train" in lines(roofline=counts)
    assert lines(roofline=None)[-1] == "roofline: the operators of a step were not counted"
    with pytest.raises(FlatoutError, match="no roofline"):
        draw(Explanation.of(history(roofline=None)), tmp_path / "r.png")
    assert Explanation.of(history(roofline=None)).as_dict()["roofline"] is None


def test_rough_rates_are_said_to_be_rough():
    counts = {**history()["roofline"], "rates": {**RATES, "spread": 2.0}}
    text = "\n".join(lines(roofline=counts))
    assert "no limits are shown: the rates are rough" in text
    assert "  gain" not in text


def test_limits_above_what_was_measured_are_not_shown_but_the_reason_is(tmp_path):
    slow = {**history()["steady_lanes_s"], "backward": 0.008}
    found = Explanation.of(history(steady_lanes_s=slow))
    assert max(lane.least_s for lane in Explanation.of(history()).lanes) > 1.15 * 0.008
    text = " ".join("\n".join(found.lines()).split())
    assert "no limits are shown: backward took 8 ms, less than the minimum of" in text
    assert "  gain" not in text
    assert found.possible_savings == []
    assert {lane.name: lane.took_s for lane in found.lanes} == slow
    with pytest.raises(FlatoutError, match="backward took 8 ms"):
        draw(found, tmp_path / "roofline.png")


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.02, "steps are 50 times as fast as they were"),
        (1.5, "steps take 1.5 times as long as they did"),
    ],
)
def test_a_pace_is_reported_by_a_number_above_one(factor, words):
    assert _pace_words(factor) == words


def test_a_picture_of_the_lanes_and_of_what_settings_promise(tmp_path):
    figure = draw(Explanation.of(history()), tmp_path / "roofline.png")
    lanes, promised = figure.axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == [
        "forward",
        "backward",
        "optimizer",
    ]
    assert len(promised.patches) == 5
    assert (tmp_path / "roofline.png").stat().st_size > 1000
    with pytest.raises(FlatoutError, match="cannot draw"):
        draw(Explanation.of(history()), tmp_path / "roofline.doc")


def test_a_fit_explains_itself(monkeypatch):
    monkeypatch.setattr("flatout.train.explanation.machine_rates", lambda *_: None)
    fit = Trainer(network(), say=quiet).fit(data(), batch_size=50, epochs=1, progress=False)
    text = fit.explain()
    assert "chosen: " in text
    assert "tuning: " in text
