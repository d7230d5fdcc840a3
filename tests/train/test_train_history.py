"""History: built on a real Timeline that recorded known durations."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_jobs import data, network, quiet

from flatout import Trainer
from flatout.errors import FlatoutError
from flatout.measure.timeline import Timeline
from flatout.train.history import History, json_safe

MS = 1_000_000


def recorded(milliseconds: list[int], samples: int = 64) -> Timeline:
    """A Timeline whose steps took these times: a fifth input, the rest backward."""
    timeline = Timeline()
    start = 0
    for ms in milliseconds:
        timeline.record(start, ms * MS // 5, 0, 0, ms * MS * 4 // 5, 0, 0, 0, samples)
        start += ms * MS
    return timeline


def fitted() -> History:
    history = History(batch_size=64, timeline=recorded([10, 20, 30, 40, 100]))
    history.epochs += [
        {"loss": 0.9, "accuracy": 0.5, "val_loss": 0.8, "val_accuracy": 0.6, "seconds": 1.0},
        {"loss": 0.4, "accuracy": 0.8, "val_loss": 0.5, "val_accuracy": 0.7, "seconds": 1.0},
        {"loss": 0.2, "accuracy": 0.9, "val_loss": 0.4, "val_accuracy": 0.8, "seconds": 1.0},
    ]
    return history


def test_history_is_a_dict_of_lists_as_in_keras() -> None:
    history = History(batch_size=1, epochs=[{"loss": 2.0}, {"loss": 1.0, "val_loss": 3.0}])
    assert history.history["loss"] == [2.0, 1.0]
    first, second = history.history["val_loss"]
    assert math.isnan(first)
    assert second == 3.0


def test_throughput_is_that_of_the_median_step() -> None:
    history = fitted()
    assert history.throughput == pytest.approx(64 / 0.030)
    assert history.percentiles()[50] == pytest.approx(0.030)
    np.testing.assert_allclose(history.step_times, [0.01, 0.02, 0.03, 0.04, 0.1])


def test_throughput_is_that_of_the_samples_that_were_there() -> None:
    timeline = recorded([10, 10, 30])
    timeline.record(10**9, 0, 0, 5 * MS, 0, 0, 0, 0, 2)
    history = History(batch_size=1000, timeline=timeline)
    # Three steps of 64 at 10 ms, one of 2 at 5 ms.
    assert history.throughput == pytest.approx(194 / 0.035)
    assert "4 steps of 64 samples" in history.summary()


def test_lanes_add_up_to_the_mean_step() -> None:
    lanes = fitted().lanes()
    assert lanes["input"] == pytest.approx(8)
    assert lanes["backward"] == pytest.approx(32)
    assert sum(lanes.values()) == pytest.approx(40)


def test_a_fit_without_a_step_has_no_throughput() -> None:
    history = History(batch_size=8)
    assert history.throughput == 0
    assert history.percentiles() == {}
    assert "0 epochs, 0 steps of 8 samples" in history.summary()


def test_the_summary_says_what_happened() -> None:
    history = fitted()
    history.stop_reason = "val_loss did not improve for 3 epochs"
    history.notes.append("ran in 2 micro-batches from step 7")
    lines = history.summary().splitlines()
    assert lines[0] == "3 epochs, 5 steps of 64 samples: 2,133 samples/s"
    assert lines[1].startswith("step 30 ms at the median, ")
    assert lines[2] == "of it backward 32, input 8"
    assert lines[3] == "loss 0.2, accuracy 0.9, val_loss 0.4, val_accuracy 0.8"
    assert lines[4] == "stopped: val_loss did not improve for 3 epochs"
    assert lines[5] == "ran in 2 micro-batches from step 7"


def test_saved_json_reads_back_and_nan_is_null(tmp_path: Path) -> None:
    history = fitted()
    history.epochs.append({"loss": math.nan, "val_loss": math.inf})
    path = history.save(tmp_path / "new" / "history.json")
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert read["epochs"][0]["loss"] == 0.9
    assert read["epochs"][3] == {"loss": None, "val_loss": None}
    assert read["step_times_s"] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.1])
    assert read["steps"] == 5
    assert read["lanes_ms"]["backward"] == pytest.approx(32)
    assert [file.name for file in path.parent.iterdir()] == ["history.json"]


@pytest.mark.slow
def test_a_full_disk_leaves_the_saved_history_whole(tmp_path: Path) -> None:
    path = fitted().save(tmp_path / "history.json")
    before = path.read_bytes()
    # In its own process, as the limit cannot be taken back without rights.
    code = """if True:
        import resource, signal, sys
        from flatout.errors import FlatoutError
        from flatout.train.history import History
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            History(batch_size=1, notes=["x" * 1000]).save(sys.argv[1])
        except FlatoutError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert "cannot save the history: File too large" in done.stdout
    assert str(path) in done.stdout
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["history.json"]


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FlatoutError, match="cannot save the history"):
        fitted().save(tmp_path / "file" / "history.json")


@given(
    st.recursive(
        st.floats() | st.integers() | st.text() | st.none() | st.booleans(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_safe_makes_any_plain_data_strict_json(value: object) -> None:
    json.dumps(json_safe(value), allow_nan=False)


def test_plot_draws_every_curve_and_lane(tmp_path: Path) -> None:
    figure = fitted().plot(tmp_path / "fit.png")
    losses, metrics, steps, lanes = figure.axes
    assert [line.get_label() for line in losses.lines] == ["loss", "val_loss"]
    assert [line.get_label() for line in metrics.lines] == ["accuracy", "val_accuracy"]
    np.testing.assert_array_equal(losses.lines[1].get_ydata(), [0.8, 0.5, 0.4])
    np.testing.assert_allclose(steps.lines[0].get_ydata(), [10, 20, 30, 40, 100])
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["input", "backward"]
    figure.draw_without_rendering()
    highest = steps.transData.transform((0, 100))[1]
    assert steps.get_legend().get_window_extent().y0 > highest
    assert not any("e+" in label.get_text() for label in lanes.texts)
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_an_empty_history_says_so(tmp_path: Path) -> None:
    figure = History(batch_size=1).plot(tmp_path / "fit.svg")
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["nothing was recorded"] * 4


def test_without_matplotlib_plot_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FlatoutError, match=r"pip install 'flatout\[plot\]'"):
        fitted().plot()


def test_a_notebook_shows_a_picture_once() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure = fitted().plot()
    assert figure._ipython_display_() is None  # pyplot shows it, the cell's value does not
    pyplot.close(figure)
    with pytest.raises(NotImplementedError):  # the value of a later cell is shown
        figure._ipython_display_()


def test_a_fit_is_printed_as_its_summary() -> None:
    assert repr(fitted()) == f"<History: {fitted().summary()}>"


def test_the_operators_of_the_first_step_are_kept():
    model = network()
    history = Trainer(model, say=quiet).fit(data(), batch_size=50, epochs=2, progress=False)
    found = history.as_dict()
    assert found["roofline"]["samples"] == 50
    assert found["roofline"]["device"] == "cpu"
    assert found["roofline"]["lanes"]["forward"]["matmul"]["flops"] == 2 * 50 * (12 * 16 + 16 * 3)
    assert set(found["roofline"]["lanes"]) == {"forward", "backward", "optimizer"}
    weights = sum(p.nbytes for p in model.parameters())
    assert found["roofline"]["weights"]["bytes"] == weights
    assert found["steady_lanes_s"]["forward"] > 0


def test_the_lanes_are_those_after_the_last_change_of_settings():
    history = History(batch_size=1)
    for ms in [*[10] * 30, *[2] * 10]:
        history.timeline.record(0, 0, 0, ms * 10**6, 3 * 10**6, 0, 10**6, 0, 1)
    history.tuning = {"spans": [{"first": 1, "last": 30}, {"first": 31, "last": 40}]}
    found = history.as_dict()["steady_lanes_s"]
    assert (found["forward"], found["backward"], found["optimizer"]) == (0.002, 0.003, 0.001)
    history.tuning, history.roofline = None, {"step": 31}
    assert history.as_dict()["steady_lanes_s"] == found


def test_a_compiled_model_is_not_counted():
    model = network()
    model.compile(backend="eager")
    history = Trainer(model, say=quiet).fit(data(), batch_size=50, epochs=1, progress=False)
    assert history.as_dict()["roofline"] is None
