"""The page of runs: what it says, what it must never let in, and how a browser lays it out."""

import json
from dataclasses import replace

import pytest
from report_runs import epoch, make_run, profile, write_lines
from test_report_page import HOSTILE, Parsed, browse, without_policy

from flatout.errors import FlatoutError
from flatout.measure import Resumed
from flatout.report import Report
from flatout.report.pictures import HEIGHT, Line, chart
from flatout.report.run import SeenRun
from flatout.report.run_page import dangers, run_page
from made_up_profiles import NOW


def written(*folders):
    report = Report([str(folder) for folder in folders])
    return run_page(report.runs, report.comparison)


def hostile(folder):
    """A run in which every name wants to be more."""
    made = profile()
    rank = replace(made.ranks[0], host=HOSTILE, device=HOSTILE, machine={"cpu": HOSTILE})
    return make_run(
        folder,
        replace(
            made,
            run=HOSTILE,
            command=[HOSTILE],
            state="failed",
            error=HOSTILE,
            model={**made.model, "name": HOSTILE},
            job={"loss": HOSTILE, "optimizer 1": HOSTILE, HOSTILE: HOSTILE},
            data={**made.data, "words": HOSTILE},
            recipe={
                "summary": HOSTILE,
                "values": {HOSTILE: HOSTILE},
                "reasons": {HOSTILE: HOSTILE},
                "measured": {HOSTILE: HOSTILE},
            },
            versions={"torch": HOSTILE},
            ranks=[rank],
            epochs=[{**epoch(n, 1.0, 1.0), HOSTILE: float(n)} for n in (1, 2)],
            notes=[HOSTILE],
        ),
    )


def test_the_page_of_a_run_says_what_was_trained_and_why(tmp_path):
    found = Parsed(written(make_run(tmp_path / "a")))
    for words in (
        "Net trained 400 steps, 2 epochs, at 1,6",
        "Net, 1.2M parameters",
        "cross_entropy",
        "loss by samples",
        "loss by time",
        "CPUs in use",
        "resident memory",
        "compute.precision bf16 1.50x [1.45,1.55]",
        "auto: bf16: 1.50x faster than plain",
        "torch 2.13.0",
    ):
        assert words in found.words, words
    assert not [tag for tag, _ in found.tags if tag in ("script", "link", "img", "a", "iframe")]


def test_pages_of_several_draw_their_curves_over_each_other(tmp_path):
    on_gpu = profile(tmp_path / "b", ms=60.0)
    machine = {**on_gpu.ranks[0].machine, "gpus": ["NVIDIA H100"] * 2}
    on_gpu = replace(on_gpu, ranks=[replace(on_gpu.ranks[0], device="cuda:0", machine=machine)])
    found = Parsed(written(make_run(tmp_path / "a"), make_run(tmp_path / "b", on_gpu)))
    assert "b is 50% slower [" in found.words
    assert "device cuda:0 (NVIDIA H100), " in found.words
    assert "device cpu (" in found.words
    assert "b against a" in found.words
    lines = [attributes["class"] for tag, attributes in found.tags if tag == "polyline"]
    assert lines.count("a") == lines.count("b") >= 4
    assert lines.count("a dashed") == lines.count("b dashed") == 2  # val_loss by both


def test_a_short_run_shows_the_loss_of_its_epochs(tmp_path):
    """The log has a line for each epoch, and for hardly a step."""
    run = make_run(tmp_path / "a", epochs=[epoch(n, 1 / n, 1.1 / n) for n in (1, 2, 3)], log=False)
    rows = [{"kind": "epoch", **epoch(n, 1 / n, 1.1 / n), "time": NOW + 8 * n} for n in (1, 2, 3)]
    step = {"kind": "step", "step": 500, "loss": 0.4, "time": NOW + 20.0}
    write_lines(run / "log.jsonl", [*rows[:2], step, rows[2]])
    curves = {curve.name: curve.points for curve in SeenRun.read(run).curves}
    assert [value for _, _, value in curves["loss"]] == [1.0, 0.5, 1 / 3]
    assert "val_loss (dashed)" in Parsed(written(run)).words
    write_lines(run / "log.jsonl", [{"kind": "epoch", "val_loss": n, "step": n} for n in (2, 1)])
    assert "val_loss (dashed)" in Parsed(written(run)).words


def test_nothing_of_a_run_becomes_markup(tmp_path):
    name = "<script>window.hacked = 1<script>"
    for page in (
        written(hostile(tmp_path / name)),
        written(hostile(tmp_path / "b" / name), hostile(tmp_path / "b" / "&amp;<img src=x>")),
    ):
        found = Parsed(page)
        assert not [tag for tag, _ in found.tags if tag in ("script", "img")]
        assert "49" not in found.words.replace("149", "")  # {{ 7 * 7 }} stays as it is
        assert "{{ 7 * 7 }}" in found.words


def test_a_run_of_which_little_is_left_has_a_page_too(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "recipe.toml").write_text("")
    assert "has no Profile" in Parsed(written(tmp_path / "a")).words
    made = replace(profile(), epochs=[], notes=[], recipe=None, data=None, input={})
    made = replace(made, steps=replace(made.steps, step_ms=[], steady=0, batch_size=None))
    assert (
        "Net trained 400 steps" in Parsed(written(make_run(tmp_path / "b", made, log=False))).words
    )


def test_damaged_trials_are_told_and_the_rest_is_shown(tmp_path):
    run = make_run(tmp_path / "a")
    (run / "history.json").write_text('{"tuning": {"trials": [{"a": 1}]}}')
    words = Parsed(written(run)).words
    assert "its trials cannot be read" in words
    assert "Net trained 400 steps" in words


def test_trials_of_the_run_are_drawn_with_their_noise(tmp_path):
    trial = {"a": {}, "b": {"compute.precision": "bf16"}, "ratio": 1.5, "low": 1.45, "high": 1.55,
             "floor": 0.01, "first": 1, "last": 20, "chosen": "b"}  # fmt: skip
    run = make_run(tmp_path / "a")
    (run / "history.json").write_text(json.dumps({"tuning": {"trials": [trial]}}))
    words = Parsed(written(run)).words
    assert "bf16 1.50x [1.45, 1.55] steps 1 to 20 · kept ±1%" in words


def test_a_resumed_run_names_what_it_went_on_from(tmp_path):
    at = Resumed("step-000000400", 400, 2)
    made = replace(profile(), resumed=at)
    made = replace(made, steps=replace(made.steps, first=401, last=800))
    words = Parsed(written(make_run(tmp_path / "a", made))).words
    assert "Net trained 400 steps, at" in words
    assert "from step-000000400: figures are of what came after it" in words
    assert "401 to 800" in words


def test_dangers_are_told(tmp_path):
    made = replace(profile(), epochs=[epoch(1, 0.9, 0.8), epoch(2, 0.5, 0.7), epoch(3, 0.1, 1.0)])
    lanes = {**made.ranks[0].lanes_ms, "input": 40.0}
    use = {**made.ranks[0].use, "cpus": [0.2, 0.2, 0.2]}
    machine = {**made.ranks[0].machine, "cpus": 2, "cpus_total": 2}
    rank = replace(made.ranks[0], lanes_ms=lanes, use=use, machine=machine)
    made = replace(made, ranks=[rank])
    (run,) = Report([str(make_run(tmp_path / "a", made, log=False))]).runs
    found = dangers(run)
    assert not any("Other work" in one for one in found)
    assert any("val_loss was 0.7 at best and is 1 at the end" in one for one in found)
    assert any("51% of a step is waiting for input" in one for one in found)
    (calm,) = Report([str(make_run(tmp_path / "b"))]).runs
    assert dangers(calm) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_work_is_reported_for_any_number_of_ranks_and_is_no_danger(tmp_path, ranks):
    (rank,) = profile().ranks
    machine = {**rank.machine, "cpus": 4 // ranks, "cpus_total": 4}  # each rank has its own CPUs
    use = {**rank.use, "machine": [0.6] * 3, "cpus": [0.4] * 3}
    all_ranks = [replace(rank, rank=n, use=use, machine=machine) for n in range(ranks)]
    folder = make_run(tmp_path / "a", replace(profile(), ranks=all_ranks))
    (run,) = Report([str(folder)]).runs
    assert dangers(run) == []
    other = 2.4 - 0.4 * ranks
    page = written(folder)
    words = f"Other work kept {other:.1f} of 4 CPUs busy: this affects speed and lanes."
    assert page.split("<section", 1)[0].count(words) == page.count(words) == 1
    drawn = page.split("CPUs in use", 1)[1].split("</figure>", 1)[0]
    assert drawn.count("<polyline") == ranks


def test_a_page_that_cannot_be_written_is_told(tmp_path):
    a = make_run(tmp_path / "a")
    with pytest.raises(FlatoutError, match="cannot write the page"):
        Report([str(a)]).write(tmp_path / "none" / "page.html")
    assert Report([str(a)]).write(None) == a / "report.html"
    assert Report([str(a), str(make_run(tmp_path / "b"))]).write(None) is None


def test_a_page_replaces_a_link_and_is_for_its_user_alone(tmp_path):
    a = make_run(tmp_path / "a", command=["train.py", "--password", "hunter2"])
    (tmp_path / "kept").write_text("kept")
    (a / "report.html").symlink_to(tmp_path / "kept")
    page = Report([str(a)]).write(None)
    assert (tmp_path / "kept").read_text() == "kept"
    assert page.lstat().st_mode & 0o777 == 0o600
    assert "hunter2" not in page.read_text()


def test_a_chart_has_round_ticks_and_keeps_peaks():
    points = [(float(x), 0.0) for x in range(10_000)]
    points[5_003] = (5_003.0, 7.3)
    found = chart("cpus", [Line("a", points)], x_is="seconds", from_zero=True)
    (_, _, _, words) = found.lines[0]
    assert len(words.split()) < 600
    heights = [float(point.partition(",")[2]) for point in words.split()]
    assert min(heights) == pytest.approx(HEIGHT * (1 - 7.3 / 8), abs=0.1)
    assert [words for _, words in found.y_ticks] == ["0", "2", "4", "6", "8"]
    assert found.x_ticks[0] == (0.0, "0s")
    assert chart("loss", [Line("a", [(0, float("nan")), (1, 1.0)])], x_is="samples") is None
    flat = chart("loss", [Line("a", [(0, 2.0), (1, 2.0)])], x_is="samples")
    assert all(0 <= top <= HEIGHT for top, _ in flat.y_ticks)


def test_a_browser_shows_it_on_a_phone_and_on_a_screen(tmp_path):
    one = make_run(tmp_path / "a")
    long = make_run(tmp_path / ("b" * 120), ms=60.0)
    pages = [
        (written(one), 360),
        (written(one, long), 360),
        (written(one, long), 1200),
        (without_policy(written(hostile(tmp_path / "c"))), 360),
    ]
    for seen, (_, width) in zip(browse(tmp_path, pages), pages, strict=True):
        assert seen["client"] == seen["scroll"] == width
        assert seen["outside"] == []
        assert seen["overlaps"] == []
        assert seen["loaded"] == 0
        assert not seen["hacked"]
