"""Runs on 1 to N ranks beside one another."""

import io
import itertools
import json
import subprocess
import sys

import pytest
from rich.console import Console

from flatout.errors import FlatoutError
from flatout.measure.timeline import LANES
from flatout.report import Scaling
from flatout.words import counted

FLATOUT = [sys.executable, "-c", "from flatout.cli.main import main; main()"]
SCRIPT = """
    import sys

    import torch
    from torch import nn

    import flatout

    torch.manual_seed(0)
    x = torch.randn(640, 20)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    trainer = flatout.Trainer(
        model, loss="cross_entropy", optimizer="sgd", lr=0.1, metrics=["accuracy"],
        run=sys.argv[1],
    )
    trainer.fit(x, x[:, :3].argmax(1), batch_size=64, epochs=2, progress=False)
"""


def lanes(**ms):
    return {lane: float(ms.get(lane, 0.0)) for lane in LANES}


def write(folder, name, ranks, *, batch_size=64, accuracy=0.9):
    run = folder / name
    run.mkdir()
    found = {
        "batch_size": batch_size,
        "world_size": len(ranks),
        "lanes_by_rank_ms": ranks,
        "startup_s": 2.5,
        "epochs": [{"loss": 2.0, "accuracy": 0.1}, {"loss": 1.0, "accuracy": accuracy}],
    }
    (run / "history.json").write_text(json.dumps(found))
    return run


@pytest.fixture
def runs(tmp_path):
    one = write(tmp_path, "one", [lanes(input=2, forward=4, backward=8, idle=2)])
    # Ideal is 8 ms. Rank 1 reads 3 ms longer than rank 0, which waits for it.
    two = write(
        tmp_path,
        "two",
        [
            lanes(input=1, forward=2, backward=4, sync=5, idle=1),
            lanes(input=4, forward=2, backward=4, sync=2, idle=1),
        ],
    )
    return [two, one]


def test_a_run_that_was_held_up_gives_no_efficiency_but_the_reason(tmp_path):
    slow = write(tmp_path, "one", [lanes(forward=48, backward=48)])
    two = write(tmp_path, "two", [lanes(forward=8, backward=8)] * 2)
    scaling = Scaling.from_runs([slow, two])
    assert scaling.efficiency(scaling.runs[1]) == pytest.approx(3.0)
    (line,) = scaling.describe()
    assert "each rank gave 2,000 samples/s here and 667 in one. Something slowed one down" in line
    assert scaling.as_dict()["runs"][1]["efficiency"] is None
    out = io.StringIO()
    Console(file=out, width=100).print(scaling)
    assert "300%" not in out.getvalue()
    assert "6.00x" not in out.getvalue()
    scaling.plot(tmp_path / "scaling.png")


def test_speed_efficiency_and_what_was_lost(runs):
    scaling = Scaling.from_runs(runs)
    assert [run.world_size for run in scaling.runs] == [1, 2]
    two = scaling.runs[1]
    assert two.samples_per_s == pytest.approx(64 / 0.013)
    assert scaling.speedup(two) == pytest.approx(16 / 13)
    assert scaling.efficiency(two) == pytest.approx(8 / 13)
    lost = scaling.lost_ms(two)
    assert lost["imbalance"] == pytest.approx(1.5)  # the slowest against the mean
    assert lost["sync"] == pytest.approx(2.0)
    assert lost["input"] == pytest.approx(1.5)
    assert lost["compute"] == pytest.approx(0.0)
    assert sum(lost.values()) == pytest.approx(13 - 8)
    assert scaling.describe() == [
        "two: a step takes 13 ms, ideal were 8; lost to sync 2, imbalance 1.5, input 1.5"
    ]


def test_another_batch_size_is_compared_by_the_sample(tmp_path):
    one = write(tmp_path, "one", [lanes(forward=10)])
    two = write(tmp_path, "two", [lanes(forward=10, sync=1)] * 2, batch_size=128)
    scaling = Scaling.from_runs([one, two])
    assert scaling.speedup(scaling.runs[1]) == pytest.approx(20 / 11)
    assert scaling.lost_ms(scaling.runs[1])["sync"] == pytest.approx(1.0)


def test_the_table_has_a_row_for_each_run(runs):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Scaling.from_runs(runs))
    text = console.export_text()
    assert all(word in text for word in ("62%", "1.23x", "2.5 s", "0.9"))


@pytest.mark.parametrize("count", [2, 8])
def test_a_picture_shows_every_bar_and_label_whole(tmp_path, count):
    names = [f"runs of the large convnet {size + 1}" for size in range(count)]
    runs = [
        write(tmp_path, name, [lanes(backward=10 / (size + 1), sync=2.0)] * (size + 1))
        for size, name in enumerate(names)
    ]
    figure = Scaling.from_runs(runs).plot(tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    figure.draw_without_rendering()
    step = figure.axes[1]
    legend = step.get_legend().get_window_extent()
    assert not any(legend.overlaps(bar.get_window_extent()) for bar in step.patches)
    labels = step.get_yticklabels()
    assert [label.get_text().replace("\n", " ") for label in labels] == [
        f"{name} {counted(size + 1, 'rank')}" for size, name in enumerate(names)
    ]
    boxes = [label.get_window_extent() for label in labels]
    left = figure.axes[0].get_window_extent().x1
    assert all(left < box.x0 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))


def test_long_names_leave_the_figures_whole(tmp_path):
    name = "a baseline with a name that is longer than any terminal is wide, of the second evening"
    runs = [write(tmp_path, f"{name} {size}", [lanes(backward=10)] * size) for size in (1, 2)]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Scaling.from_runs(runs))
    text = console.export_text()
    assert "efficiency" in text
    assert "…" not in text


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"lanes_by_rank_ms": 3}', '{"lanes_by_rank_ms": [{"input": "x"}]}']
)
def test_what_is_no_run_is_named(tmp_path, content):
    file = tmp_path / "history.json"
    file.write_text(content)
    with pytest.raises(FlatoutError, match="expected the figures of a fit") as caught:
        Scaling.from_runs([tmp_path])
    assert "history.json" in str(caught.value)


def test_a_missing_run_is_named(tmp_path):
    with pytest.raises(FlatoutError, match="cannot read"):
        Scaling.from_runs([tmp_path / "absent"])


def test_a_run_without_all_its_ranks_is_refused(tmp_path):
    run = write(tmp_path, "one", [])
    with pytest.raises(FlatoutError, match="not trained to its end"):
        Scaling.from_runs([run])


@pytest.mark.slow
def test_runs_on_one_rank_and_on_two(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("\n".join(line.removeprefix("    ") for line in SCRIPT.split("\n")))
    for ranks in (1, 2):
        command = [*FLATOUT, "run", "--devices", str(ranks), script, tmp_path / f"runs-{ranks}"]
        subprocess.run(command, check=True, timeout=120)
    shown = subprocess.run(
        [*FLATOUT, "scaling", "--json", tmp_path / "runs-1", "runs-2"],
        cwd=tmp_path, check=True, timeout=60, capture_output=True, text=True,
    )  # fmt: skip
    one, two = json.loads(shown.stdout)["runs"]
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["figures"]["loss"] == pytest.approx(two["figures"]["loss"], rel=1e-4)
    assert one["startup_s"] > 0
    if two["lost_ms"] is None:  # other work on the machine slowed the first run down
        assert two["samples_per_s"] > 2 * one["samples_per_s"]
    else:
        assert sum(two["lost_ms"].values()) == pytest.approx(two["step_ms"] - one["step_ms"] / 2)
