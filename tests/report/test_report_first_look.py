"""What a terminal shows of a verdict: on 80 columns, in the order that matters."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from flatout.devices.gpus import Gpu
from flatout.devices.inventory import inventory
from flatout.doctor.critical import critical
from flatout.doctor.finding import Edit, Finding
from flatout.doctor.judge import Verdict, judge
from flatout.observe import (
    Ablation,
    Growth,
    Lapse,
    LeftOut,
    Line,
    Loader,
    Model,
    ModuleTime,
    Observation,
    OtherThread,
    Site,
)
from flatout.report.first_look import MOST_LINES, FirstLookReport, header, short
from flatout.report.lane_bars import rank_bars
from flatout.report.page import page


def observation(**lanes):
    return Observation(
        ["train.py"],
        steps=312,
        step_ms=[412.0] * 312,
        lanes_ms={"input": 251.0, "forward": 58.0, "backward": 87.0, "optimizer": 12.0, "host": 4.0}
        | lanes,
        usable_cpus=2,
        loaders=[Loader("DataLoader", Site("train.py", 41), num_workers=0, batches=312)],
        models=[Model("Net", evaluated_in_train_mode=Site("train.py", 120))],
        added_us_per_step=3.1,
    )


def shown(verdict, what=("train.py", "--name", "a b"), width=80, **more):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(FirstLookReport(verdict, inventory(), 27.4, what, **more))
    return console.file.getvalue()


@pytest.fixture(scope="module")
def verdict():
    return judge([observation()], inventory())


def test_what_did_not_contain_the_script_is_told(verdict):
    console = Console(file=io.StringIO(), width=80, highlight=False)
    lacks = ["orphans", "network"]
    console.print(FirstLookReport(verdict, inventory(), 27.4, ["train.py"], lacks=lacks))
    words = " ".join(console.file.getvalue().split())
    assert (
        "Not contained here: a program that it starts can outlive a trial that is killed; native "
        "code and programs that it starts can reach other machines" in words
    )
    assert "Not contained" not in shown(verdict)


@pytest.mark.parametrize(
    ("step_ms", "us", "once", "words"),
    [
        (412.0, 3.1, 20.0, "added 3.1 us per step\n"),
        (0.31, 3.1, None, "added 3.1 us per step (1.0%)\n"),
        (40.0, 158.2, 9.0, "added 158 us per step (0.4%)\n"),
        (40.0, None, None, "added not counted\n"),
        (0.4, 9.0, 70.4, "added 9 us per step, 70 ms once\n"),
    ],
)
def test_what_observing_costs_is_told_with_its_share_of_a_step(step_ms, us, once, words):
    seen = dataclasses.replace(
        observation(),
        step_ms=[step_ms, step_ms, 900.0],
        added_us_per_step=us,
        added_once_ms=once,
    )
    assert words in shown(judge([seen], inventory()))


def test_what_matters_most_comes_first(verdict):
    text = shown(verdict)
    begins = (
        "torch ",
        "[0:27] FIRST LOOK at 312 steps, nothing proven; added 3.1 us per step",
        "step 412 ms  input █",
        "the model waits for input, train.py:41",
        "DANGER     train.py:120 validates without eval()",
        "COULD BE TRIED",
        "251 ms     train.py:41",
        "next  flatout doctor train.py --name 'a b'",
    )
    places = [text.find(begin) for begin in begins]
    assert -1 not in places, text
    assert places == sorted(places)


def much():
    """A verdict with more of everything than a screen has room for, in long words."""
    words = (
        "the optimizer holds two tensors that the loss never reaches, since the head was replaced"
    )
    kinds = {"danger": 9, "slow": 9, "note": 3}
    found = [
        Finding(kind, f"{words} ({number})", words, name="a", where="a/long/way/model.py:88",
                cost_ms=300.0 - 30 * number, parity="rounding")
        for kind, count in kinds.items()
        for number in range(count)
    ]  # fmt: skip
    lines = [
        Line(Site(f"engine/tracker_{number}.py", 34), 40.0 - number, {"host": 40.0 - number},
             "torch.quantile", [Site("engine/loop_of_the_script.py", 27)], "BertLayer",
             growth=Growth(3.1, 2.9, 3.3))
        for number in range(9)
    ]  # fmt: skip
    lanes = {"copy": 21.0, "evaluation": 90.0, "gc": 9.0, "host": 40.0}
    seen = dataclasses.replace(observation(**lanes), lines=lines, explained=0.98)
    unknown = [("set_epoch_missing", "no loader was seen that gave the batches")]
    return Verdict([seen], {}, critical([seen]), found, ["pin_memory"], unknown)


def of_ranks(many, verdict):
    """As if each rank had shown all that can stand above what was found."""
    (seen,) = verdict.observations
    faster = Ablation(2.5, 2.4, 2.6, 0.01, 5, 412.0, 161.0, 255.0)
    seen = dataclasses.replace(
        seen,
        ablations=dict.fromkeys(("input", "log", "evaluation", "saving", "item", "sync"), faster),
        left_out=[LeftOut(Site("engine/tracker.py", 34), "self.tracker.log", faster)] * 9,
        lapse=Lapse(8.0, 20, 2, ["validation", "checkpoint"], [("train.py:40", 6, 23_438)]),
    )
    ranks = [dataclasses.replace(seen, rank=rank, world_size=many) for rank in range(many)]
    return dataclasses.replace(verdict, observations=ranks, critical=critical(ranks))


@pytest.mark.parametrize("width", [80, 100])
def test_a_first_look_has_twenty_lines_of_whole_words_and_the_rest_is_verbose(width):
    few = dataclasses.replace(much(), findings=much().findings[:2] + much().findings[9:])
    for verdict, cures in ((much(), 3), (few, 0), (of_ranks(8, much()), 3)):
        text = shown(verdict, width=width, cures=cures)
        lines = text.splitlines()
        assert len(lines) <= MOST_LINES, text
        assert all(len(line) <= width and line == line.rstrip() for line in lines)
        assert "DANGER     a/long/way/model.py:88 the optimizer holds" in text
        assert "--verbose" in text
        assert "\nnext  flatout doctor " in text
        assert "no signal" not in text
        assert "left alone" not in text
    assert "98% explained" in text
    grows = "engine/tracker_0.py:34 torch.quantile, 3.1 us" + " [2.9,3.3]" * (width > 80)
    assert f"{grows} more each step" in text
    full = shown(much(), width=width, verbose=True)
    assert full.count("DANGER") == 9
    assert "1 had no signal" in full
    assert full.count("left alone") == 3


def test_notes_on_what_is_learned_and_busy_threads_have_a_line_where_there_is_room():
    note = Finding("note", "4 backward passes", "d", name="a", parity="changes learning")
    seen = dataclasses.replace(
        observation(),
        lines=[Line(Site("train.py", 30), 200.0, {"host": 200.0}, "queue.get")],
        explained=0.9,
        other_threads=[
            OtherThread("maker", Site("data.py", 44, "image.load()"), 0.7, 0.61),
            OtherThread("idle", Site("data.py", 9, "sleep(1)"), 0.05, 0.05),
        ],
    )
    text = shown(Verdict([seen], {}, critical([seen]), [note], [], []))
    assert "NOTE       4 backward passes" in text
    assert "61%        data.py:44 image.load(), thread maker" in text
    assert "idle" not in text
    crowded = dataclasses.replace(much(), findings=[*much().findings, note])
    assert "NOTE" not in shown(crowded)


def test_backward_is_told_by_modules_where_they_stand_among_the_lines():
    lines = [
        Line(Site("train.py", 8), 58.0, {"forward": 58.0}, "model"),
        Line(Site("train.py", 9), 87.0, {"backward": 87.0}, "loss.backward"),
    ]
    modules = [
        ModuleTime("", "Net", 1, 0.0, 2.0),
        ModuleTime("layers.*.attention", "Attention", 6, 20.0, 61.0, "Bmm"),
        ModuleTime("", "", 1, 0.0, 15.0, "LogSoftmax"),
        ModuleTime("head", "Linear", 1, 1.0, 14.0),
    ]
    seen = dataclasses.replace(observation(), lines=lines, modules=modules, explained=1.0)
    text = shown(Verdict([seen], {}, None, [], [], []))
    rows = (
        "61 ms      backward of layers.*.attention (6 Attention), by Bmm\n"
        "58 ms      train.py:8 model\n"
        "15 ms      backward outside of the model's modules, by LogSoftmax\n"
    )
    assert rows in text
    assert "head" not in text
    full = shown(Verdict([seen], {}, None, [], [], []), verbose=True)
    assert "14 ms      backward of head (Linear)\n" in full
    assert "Net" not in full


def test_what_returns_less_than_noise_and_calls_that_are_a_lane_are_not_listed():
    small = [Finding("slow", "w", "d", name="a", cost_ms=12.0)]
    calls = [
        Line(Site("train.py", 9), 87.0, {"backward": 87.0}, "loss.backward"),
        Line(Site("train.py", 8), 58.0, {"forward": 58.0}, "model", trainer="", within="Net"),
        Line(Site("train.py", 3), 11.0, {"host": 11.0}, "log"),
    ]
    seen = dataclasses.replace(observation(), lines=calls, explained=1.0)
    text = shown(Verdict([seen], {}, None, small, [], []))
    assert "COULD BE TRIED" not in text
    assert "could be tried" not in text
    assert "58 ms      train.py:8 model, in Net\n" in text
    assert "backward" not in text
    assert "log" not in text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_lanes_take_one_line_and_bars_the_room_that_is_left(verdict, width):
    (line,) = [line for line in shown(verdict, width=width).splitlines() if "step 412" in line]
    assert line.rstrip().endswith("| other 4")
    assert len(line.rstrip()) <= width
    wait, forward, backward = (part.count("█") for part in line.split("|")[:3])
    assert wait > 2 * backward
    assert backward >= forward >= 1


def test_bars_stay_apart_where_there_are_many_lanes():
    lanes = {"copy": 21.0, "evaluation": 90.0, "host": 44.0, "gc": 9.0, "sync": 30.0}
    seen = dataclasses.replace(observation(**lanes), rank=11, world_size=12)
    (line,) = [line.plain for line in rank_bars(seen, True, 80)]
    assert len(line) <= 80
    parts = line.split("|")
    assert parts[0].count("█") > 2 * max(part.count("█") for part in parts[1:]) > 0
    assert parts[-1].startswith(" other ")


def test_what_was_taken_out_is_one_line():
    seen = observation()
    seen.ablations = {
        "input": Ablation(2.56, 2.5, 2.62, 0.01, 5, 412.0, 161.0, 255.0),
        "evaluation": Ablation(1.2, 1.2, 1.2),
    }
    text = shown(judge([seen], inventory()))
    assert "taken out in place: input 2.56x [2.50,2.62], evaluation 1.20x\n" in text
    assert "a step would take 161 ms instead of 412 ms" in " ".join(text.split())
    noise = {"log": Ablation(1.4, 0.9, 2.3, 0.1, 4), "item": Ablation(1.02, 1.01, 1.03, 0.01, 4)}
    seen.ablations |= noise | {"sync": Ablation(1.2, 1.1, 1.3, 0.3, 4)}
    assert "input 2.56x [2.50,2.62], evaluation 1.20x\n" in shown(judge([seen], inventory()))
    full = " ".join(shown(judge([seen], inventory()), verbose=True).split())
    assert "evaluation 1.20x, log 1.40x [0.90,2.30], item 1.02x [1.01,1.03], sync 1.20x" in full


def test_a_call_that_was_left_out_has_a_figure():
    seen = observation()
    site = Site("/a/folder/that/has/a/long/name/engine/tracker.py", 34)
    faster = Ablation(1.5, 1.45, 1.55, 0.02, 4, 6.0, 4.0, 2.1)
    seen.left_out = [
        LeftOut(site, "self.tracker.log", faster),
        LeftOut(site, "noise", Ablation(1.01, 0.98, 1.04, 0.02, 4, 6.0, 5.9, 0.2)),
    ]
    lines = [line for line in shown(judge([seen], inventory())).splitlines() if "costs" in line]
    (line,) = lines
    assert line.endswith("costs 2 ms a step [1.9,2.1], 33%")
    assert len(line) <= 80


def test_what_a_time_lapse_has_shown_and_cut_is_two_lines():
    seen = observation()
    cut = [("train.py:40", 6, 23_438), ("train.py:52", 3, 391), ("stream.py:7", 5, None)]
    seen.lapse = Lapse(6.0, 12, 2, ["validation", "checkpoint", "schedule"], cut)
    verdict = judge([seen], inventory())
    lines = shown(verdict).splitlines()
    at = next(at for at, line in enumerate(lines) if "time-lapse" in line)
    assert " 2 epochs in time-lapse, with validation, checkpoint and schedule" in lines[at]
    assert lines[at + 1].startswith("cut, and in no time above: train.py:40 after 6 of 23,438,")
    assert all(len(line) <= 80 for line in lines[at : at + 2])
    seen.lapse.parts = []
    assert "1 epoch" not in shown(verdict)
    assert "in time-lapse, with nothing after them\n" in shown(verdict)


def test_a_cost_that_is_no_bound_is_called_an_estimate():
    found = Finding("slow", "w", "d", name="a", cost_ms=30.0, is_estimate=True)
    text = shown(Verdict([observation()], {}, None, [found], [], []))
    assert "\n~30 ms     w" in text
    assert "per step (~: an estimate)\n" in text
    bound = dataclasses.replace(found, is_estimate=False)
    text = shown(Verdict([observation()], {}, None, [bound], [], []))
    assert "\n30 ms      w" in text
    assert "estimate" not in text


def test_what_takes_more_than_time_is_listed_first_and_what_has_no_room_is_named():
    found = [
        Finding("slow", "w", "d", name=f"check_{at}", where=f"train.py:{at}", cost_ms=50.0 - at)
        for at in range(6)
    ]
    disk = Finding("slow", "writes", "d", name="disk", cost_ms=0.1, takes="14 GB/h")
    text = shown(Verdict([observation()], {}, None, [*found, disk], [], []))
    assert text.index("\n14 GB/h    writes") < text.index("\n50 ms      train.py:0 w")
    assert "; 4 more: --verbose\n" in text
    assert "check_3" not in text


@pytest.mark.parametrize("width", [80, 100])
def test_what_could_be_tried_stays_where_there_is_little_room(width):
    lines = [Line(Site("train.py", at), 60.0, {"forward": 60.0}, f"layer{at}") for at in range(5)]
    seen = dataclasses.replace(observation(), lines=lines, explained=1.0)
    seen.lapse = Lapse(6.0, 12, 2, ["validation"], [("train.py:40", 6, 100)])
    seen.ablations = {"evaluation": Ablation(1.2, 1.2, 1.2)}
    danger = Finding("danger", "gradients are clipped " * 9, "unscale_", where="train.py:1")
    slow = [
        Finding("slow", f"finding {at} is slow", "d", name=f"c{at}", cost_ms=50.0 - at,
                recipe={"process.threads": 2}, edits=(Edit("train.py", 1, "a", "b"),))
        for at in range(2)
    ]  # fmt: skip
    text = shown(Verdict([seen], {}, None, [danger, *slow], [], []), width=width, cures=2)
    assert len(text.splitlines()) <= MOST_LINES
    for told in ("WHERE IT GOES", "train.py:0 layer0", "finding 0 is slow", "finding 1 is slow"):
        assert told in text


def test_each_rank_has_its_line():
    ranks = [dataclasses.replace(observation(), rank=at, world_size=2) for at in (0, 1)]
    text = shown(judge(ranks, inventory()))
    assert "rank 0 step 412 ms" in text
    assert "rank 1 step 412 ms" in text
    assert "2 ranks" in text.splitlines()[0]


def test_what_takes_hold_at_the_start_of_any_script_is_a_command():
    found = Finding("slow", "w", "d", name="a", recipe={"process.threads": 2, "input.workers": 4})
    text = shown(Verdict([observation()], {}, None, [found], [], []), ("train.py",))
    assert "next  flatout run --set process.threads=2 train.py\n" in text
    assert "input.workers" not in text


def test_no_step_no_verdict():
    text = shown(judge([Observation(["tool.py"], ended="no steps")], inventory()))
    assert "no optimizer step was seen" in text
    assert "FIRST LOOK" not in text
    assert "checks found nothing" not in text


def test_the_header_names_the_gpu_that_computes_or_stands_by(verdict):
    gpu = Gpu(0, "GPU-1", "L4", 24 * 2**30, 0, (8, 9), 1, ())
    machine = dataclasses.replace(inventory(), cuda=(gpu,))
    assert " beside L4" in header(verdict, machine)
    on_gpu = dataclasses.replace(observation(), device="cuda:0")
    assert " · L4 24 GB · " in header(judge([on_gpu], machine), machine)


def test_places_are_as_short_as_they_can_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short(str(tmp_path / "train.py") + ":7") == "train.py:7"
    assert short("/elsewhere/train.py:7") == "/elsewhere/train.py:7"
    assert short("/elsewhere/projects/of/somebody/train.py:7") == ".../somebody/train.py:7"
    inside = "a/long/path/that/an/editor/can/open/train.py:7"
    assert short(str(tmp_path / inside)) == inside
    assert short("") == ""


def test_the_page_takes_the_same_verdict(verdict):
    text = page(json.loads(json.dumps(verdict.as_dict())))
    assert "the model waits for input" in text
    assert "train.py:120" in text
