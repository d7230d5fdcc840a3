"""Callbacks driven alone, as a fit drives them, over a real model and optimizer; then in real fits.

A Fit here calls with figures that a test chooses, so that each turn of a training can be had.
"""

from __future__ import annotations

import io
import json
import math
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable as Function
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import flatout
from flatout.errors import ModelError
from flatout.models import weights_of
from flatout.train.callbacks import (
    BestCheckpoint,
    Callback,
    EarlyStopping,
    JsonLines,
    Log,
    Progress,
    TensorBoard,
)
from flatout.train.callbacks import json_lines as json_lines_module
from flatout.train.callbacks import progress as progress_module
from flatout.train.callbacks import rate as rate_module
from flatout.train.callbacks.callback import Figures
from flatout.train.callbacks.monitor import Monitor
from flatout.train.history import History
from flatout.train.state import FitState


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))


pytestmark = pytest.mark.usefixtures("_own_cache")


class Fit:
    """Calls callbacks in the order of a fit; what a Trainer would compute is given by the test."""

    def __init__(self, *callbacks: Callback, epochs: int = 3, steps: int | None = 4) -> None:
        self.callbacks = callbacks
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.saved: list[float] = []
        self.losses_read = 0
        trainer: Any = SimpleNamespace(
            model=self.model,
            optimizer=self.optimizer,
            loop=SimpleNamespace(
                learning_rate=0.5,
                mean_loss=self._read_loss,
                weights=lambda: weights_of(self.model),
            ),
            save_checkpoint=self._save,
        )
        self.state = FitState(
            trainer=trainer,
            history=History(batch_size=10),
            epochs=epochs,
            steps_per_epoch=steps,
            batch_size=10,
        )

    def _save(self, score: float) -> str:
        self.saved.append(score)
        return f"checkpoint-{len(self.saved)}"

    def _read_loss(self) -> float:
        self.losses_read += 1
        return 1 / self.state.step

    def call(self, name: str, *more: object) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self.state, *more)

    def step(self) -> None:
        state = self.state
        with torch.no_grad():
            self.model.weight.fill_(state.step + 1)
        now = time.perf_counter_ns()
        state.history.timeline.record(now, 0, 0, 1_000_000, 0, 0, 0, 0, 10)
        state.step += 1
        state.step_in_epoch += 1
        for callback in self.callbacks:
            if state.step % callback.every == 0:
                callback.on_step(state)

    def run(self, logs: Function[[int], Mapping[str, float]], steps: int = 4) -> FitState:
        state = self.state
        self.call("on_fit_start")
        while state.epoch < state.epochs and state.stop_reason is None:
            state.step_in_epoch = 0
            self.call("on_epoch_start")
            for _ in range(steps):
                self.step()
            state.logs = dict(logs(state.epoch))
            self.call("on_epoch_end")
            state.epoch += 1
        state.epoch -= 1
        self.call("on_fit_end")
        return state


def series(name: str, values: list[float]) -> Function[[int], dict[str, float]]:
    return lambda epoch: {"loss": 1.0, name: values[epoch]}


# -- Monitor ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("val_loss", "min"),
        ("loss", "min"),
        ("val_mean_squared_error", "min"),
        ("perplexity", "min"),
        ("val_accuracy", "max"),
        ("val_multiclassaccuracy", "max"),
        ("val_auroc", "max"),
        ("average_precision", "max"),
        ("val_f1", "max"),
    ],
)
def test_auto_mode_tells_by_the_name(name: str, mode: str) -> None:
    assert Monitor(name).mode == mode


@pytest.mark.parametrize("complete", [True, False])
def test_auto_mode_does_not_guess(complete: bool) -> None:
    with pytest.raises(ModelError, match=r"smaller or a larger val_zeal is better(.|\n)*mode="):
        Monitor("val_zeal").check(Figures(("loss", "val_zeal"), complete))
    with pytest.raises(ModelError, match="mode cannot be 'up'"):
        Monitor("val_zeal", mode="up")  # type: ignore[arg-type]


@given(st.lists(st.floats(allow_infinity=True, allow_nan=True)), st.sampled_from(["min", "max"]))
def test_the_monitor_keeps_the_best_that_is_a_number(values: list[float], mode: Any) -> None:
    monitor = Monitor("figure", mode)
    for value in values:
        monitor.improves(value)
    numbers = [value for value in values if not math.isnan(value)]
    best = {"min": min, "max": max}[mode]
    assert monitor.best == (best(numbers) if numbers else None)


def test_min_delta_asks_for_more_than_a_hair() -> None:
    monitor = Monitor("loss", min_delta=0.1)
    assert [monitor.improves(value) for value in (1.0, 0.95, 0.9, 0.85)] == [
        True,
        False,
        False,
        True,
    ]


# -- EarlyStopping ---------------------------------------------------------------------------------


def test_early_stopping_stops_and_puts_the_best_weights_back_in_place() -> None:
    stopping = EarlyStopping(patience=2)
    fit = Fit(stopping, epochs=10)
    parameter = fit.model.weight
    state = fit.run(series("val_loss", [0.9, 0.5, 0.6, 0.7, 0.1]))
    assert state.epoch == 3
    assert state.stop_reason == "val_loss did not improve for 2 epochs"
    # The weights were set to the step number; epoch 2 ended at step 8.
    assert fit.model.weight is parameter
    assert parameter.tolist() == [[8.0, 8.0]]
    assert (stopping.best, stopping.best_epoch) == (0.5, 2)
    assert state.history.notes == ["weights of epoch 2 put back: val_loss 0.5"]


def test_early_stopping_can_leave_the_last_weights() -> None:
    fit = Fit(EarlyStopping(patience=1, restore_best=False), epochs=10)
    fit.run(series("val_loss", [0.9, 1.0]))
    assert fit.model.weight.tolist() == [[8.0, 8.0]]
    assert fit.state.history.notes == []


def test_the_best_weights_come_back_also_where_epochs_ran_out() -> None:
    fit = Fit(EarlyStopping("val_accuracy", patience=5), epochs=3)
    fit.run(series("val_accuracy", [0.6, 0.9, 0.7]))
    assert fit.state.stop_reason is None
    assert fit.model.weight.tolist() == [[8.0, 8.0]]


def test_nan_is_no_improvement() -> None:
    fit = Fit(EarlyStopping(patience=2), epochs=10)
    assert fit.run(series("val_loss", [0.5, math.nan, math.nan, 0.1])).epoch == 2


def test_nan_from_the_start_stops_without_touching_the_weights() -> None:
    fit = Fit(EarlyStopping(patience=1), epochs=10)
    assert fit.run(series("val_loss", [math.nan])).epoch == 0
    assert fit.model.weight.tolist() == [[4.0, 4.0]]


def test_an_unknown_figure_is_named_after_the_first_epoch() -> None:
    fit = Fit(EarlyStopping("val_loss"))
    with pytest.raises(ModelError) as caught:
        fit.run(lambda epoch: {"loss": 1.0, "accuracy": 0.5})
    assert "'val_loss'; there is: loss, accuracy" in str(caught.value)
    assert "validation_data" in str(caught.value)
    assert fit.state.epoch == 0


def test_a_used_early_stopping_forgets_the_last_fit() -> None:
    stopping = EarlyStopping(patience=1)
    Fit(stopping, epochs=5).run(series("val_loss", [0.1, 0.2]))
    second = Fit(stopping, epochs=2)
    second.run(series("val_loss", [0.9, 0.8]))
    assert second.state.stop_reason is None
    assert stopping.best == 0.8


def test_resumed_early_stopping_goes_on_where_it_was() -> None:
    values = [0.9, 0.5, 0.6, 0.7, 0.1]
    first = EarlyStopping(patience=2)
    Fit(first, epochs=3).run(series("val_loss", values))
    second = EarlyStopping(patience=2)
    second.load_state_dict(first.state_dict())
    fit = Fit(second, epochs=10)
    fit.state.epoch, fit.state.step = 3, 12
    fit.run(series("val_loss", values))
    assert fit.state.epoch == 3
    assert fit.model.weight.tolist() == [[8.0, 8.0]]


def test_its_state_is_not_changed_by_later_epochs() -> None:
    stopping = EarlyStopping()
    fit = Fit(stopping, epochs=1)
    fit.run(series("val_loss", [0.9]))
    state = stopping.state_dict()
    fit.state.epoch, fit.state.logs = 1, {"val_loss": 0.1}
    with torch.no_grad():
        fit.model.weight.fill_(77)
    stopping.on_epoch_end(fit.state)
    assert state["weights"]["weight"].tolist() == [[4.0, 4.0]]


# -- BestCheckpoint --------------------------------------------------------------------------------


def test_best_checkpoint_saves_on_improvement_only() -> None:
    best = BestCheckpoint("val_accuracy")
    fit = Fit(best, epochs=5)
    fit.run(series("val_accuracy", [0.5, 0.4, 0.7, math.nan, 0.7]))
    # Smaller scores are better ones.
    assert fit.saved == [-0.5, -0.7]
    assert best.path == "checkpoint-2"
    assert best.best == 0.7


def test_best_checkpoint_hands_a_loss_over_as_it_is() -> None:
    fit = Fit(BestCheckpoint(), epochs=3)
    fit.run(series("val_loss", [0.5, 0.6, 0.4]))
    assert fit.saved == [0.5, 0.4]


def test_resumed_best_checkpoint_knows_the_best() -> None:
    first = BestCheckpoint()
    Fit(first, epochs=1).run(series("val_loss", [0.5]))
    second = BestCheckpoint()
    second.load_state_dict(first.state_dict())
    fit = Fit(second, epochs=2)
    fit.run(series("val_loss", [0.6, 0.55]))
    assert fit.saved == []
    assert second.path == "checkpoint-1"


# -- JsonLines -------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_json_lines_of_steps_and_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "log.jsonl"
    now = SimpleNamespace(time=lambda: 1790000000.12345)
    monkeypatch.setattr(json_lines_module, "time", now)
    Fit(JsonLines(path, every=2), epochs=2).run(series("val_loss", [0.5, math.nan]))
    entries = lines(path)
    assert [(e["kind"], e["step"], e["epoch"]) for e in entries] == [
        *(("step", 2, 1), ("step", 4, 1), ("epoch", 4, 1)),
        *(("step", 6, 2), ("step", 8, 2), ("epoch", 8, 2)),
    ]
    assert list(entries[0]) == ["kind", "step", "epoch", "loss", "lr", "samples_per_s", "time"]
    assert entries[0]["loss"] == 0.5
    assert entries[0]["lr"] == 0.5
    assert entries[0]["samples_per_s"] > 0
    assert entries[0]["time"] == 1790000000.123
    assert entries[2]["val_loss"] == 0.5
    assert entries[5]["val_loss"] is None


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    fit = Fit(JsonLines(tmp_path / "log", every=1))
    fit.call("on_fit_start")
    fit.call("on_epoch_start")
    for count in (1, 2, 3):
        fit.step()
        assert len(lines(tmp_path / "log")) == count
    fit.call("on_fit_error", RuntimeError())
    assert fit.losses_read == 3


def test_a_second_fit_appends(tmp_path: Path) -> None:
    for _ in range(2):
        Fit(JsonLines(tmp_path / "log", every=4), epochs=1).run(series("val_loss", [0.5]))
    assert [entry["step"] for entry in lines(tmp_path / "log")] == [4, 4, 4, 4]


def test_a_resume_takes_back_what_the_interrupted_run_wrote_beyond(tmp_path: Path) -> None:
    path = tmp_path / "log"
    Fit(JsonLines(path, every=1), epochs=2).run(series("val_loss", [0.5, 0.4]))
    whole = [(e["kind"], e["step"]) for e in lines(path)]
    # The last line is torn, as by a kill -9; the checkpoint is that of step 6.
    path.write_bytes(path.read_bytes()[:-20])
    fit = Fit(JsonLines(path, every=1), epochs=2)
    fit.state.step, fit.state.epoch = 6, 1
    fit.run(series("val_loss", [0.5, 0.4]), steps=2)
    assert [(e["kind"], e["step"]) for e in lines(path)] == whole


def _limited(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose files cannot grow beyond 200 bytes."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))

    return subprocess.run(
        [sys.executable, "-B", "-c", code, str(Path(__file__).parent), str(path)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=limit,
    )


@pytest.mark.slow
def test_a_full_disk_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    code = """if True:
        import sys
        sys.path.insert(0, sys.argv[1])
        from test_train_callbacks import Fit, JsonLines, series
        fit = Fit(JsonLines(sys.argv[2], every=1), epochs=3)
        print("trained", fit.run(series("val_loss", [1, 2, 3])).step, "steps")
    """
    done = _limited(code, tmp_path / "log")
    assert done.stdout == "trained 12 steps\n"
    assert done.stderr.count("the log cannot be written and stops here") == 1
    assert "File too large" in done.stderr
    # What fitted is whole lines.
    assert len(lines(tmp_path / "log")) == 1


def test_a_device_without_room_warns_too() -> None:
    fit = Fit(JsonLines("/dev/full", every=1), epochs=2)
    with pytest.warns(UserWarning, match="the log cannot be written") as warned:
        assert fit.run(series("val_loss", [1, 2])).step == 8
    assert len(warned) == 1


# -- Log and TensorBoard ---------------------------------------------------------------------------


class Tracker:
    def __init__(self, broken: bool = False) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self.broken = broken

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.broken:
            raise ConnectionError("no route to host")
        self.logged.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


def test_log_feeds_any_logger() -> None:
    tracker = Tracker()
    Fit(Log(tracker, every=4), epochs=1).run(series("val_loss", [0.5]))
    (first, of_step), (second, of_epoch) = tracker.logged
    assert (first, second) == (4, 4)
    assert of_step["step/loss"] == 0.25
    assert of_step["step/lr"] == 0.5
    assert of_step["step/samples_per_s"] > 0
    assert of_epoch == {"epoch/loss": 1.0, "epoch/val_loss": 0.5}
    assert tracker.closed == 1


def test_log_closes_the_logger_also_on_an_error() -> None:
    tracker = Tracker()
    fit = Fit(Log(tracker))
    fit.call("on_fit_start")
    fit.call("on_fit_error", RuntimeError())
    assert tracker.closed == 1


def test_a_logger_that_loses_its_connection_does_not_end_training() -> None:
    fit = Fit(Log(Tracker(broken=True), every=1), epochs=2)
    with pytest.warns(UserWarning, match="Tracker failed, training goes on") as warned:
        assert fit.run(series("val_loss", [1, 2])).step == 8
    assert len(warned) == 1
    assert fit.losses_read == 1


def test_a_logger_with_a_fault_of_its_own_is_not_hidden() -> None:
    class Faulty(Tracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise KeyError("values")

    with pytest.raises(KeyError):
        Fit(Log(Faulty(), every=1)).run(series("val_loss", [1, 2, 3]))


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, round(event.value, 5)) for event in events.Scalars(name)]


def test_tensorboard_reads_what_was_written_and_a_resume_hides_the_rest(tmp_path: Path) -> None:
    Fit(TensorBoard(tmp_path, every=2), epochs=2).run(series("val_loss", [0.5, 0.4]))
    assert scalars(tmp_path, "step/loss") == [(2, 0.5), (4, 0.25), (6, 0.16667), (8, 0.125)]
    assert scalars(tmp_path, "epoch/val_loss") == [(4, 0.5), (8, 0.4)]
    resumed = Fit(TensorBoard(tmp_path, every=1), epochs=2)
    resumed.state.step, resumed.state.epoch = 6, 1
    resumed.run(series("val_loss", [0.5, 0.3]), steps=1)
    assert [step for step, _ in scalars(tmp_path, "step/loss")] == [2, 4, 6, 7]
    assert scalars(tmp_path, "epoch/val_loss") == [(4, 0.5), (7, 0.3)]


def test_without_tensorboard_the_error_tells_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModelError, match=r"pip install 'flatout\[tensorboard\]'"):
        TensorBoard(tmp_path)


# -- Progress --------------------------------------------------------------------------------------


class Clock:
    """Time in seconds that passes only where a test lets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (progress_module, rate_module):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=False)


def written(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_without_a_terminal_epochs_get_a_plain_line() -> None:
    console = plain_console()
    fit = Fit(Progress(console=console), epochs=2)
    fit.run(lambda epoch: {"loss": 0.5, "val_loss": 0.06671, "val_auc": 0.98765, "seconds": 75.2})
    # Steps of 1 ms with 10 samples each.
    assert written(console) == [
        "epoch 1/2  10k samples/s  loss 0.5 val 0.0667  val_auc 0.9877  1:15",
        "epoch 2/2  10k samples/s  loss 0.5 val 0.0667  val_auc 0.9877  1:15",
    ]
    assert fit.losses_read == 0


def test_without_a_terminal_time_decides_on_a_line(clock: Clock) -> None:
    console = plain_console()
    fit = Fit(Progress(console=console, line_every=1), epochs=1, steps=1000)
    fit.call("on_fit_start")
    fit.call("on_epoch_start")
    for _ in range(4):
        clock.now += 0.4
        fit.step()
    # 30 samples in 1.2 s.
    assert written(console) == ["epoch 1/1  0%  25 samples/s  ETA 6:39  loss 0.3333  input wait 0%"]
    assert fit.losses_read == 1


def test_of_many_short_epochs_the_final_one_gets_its_line(clock: Clock) -> None:
    console = plain_console()

    def logs(epoch: int) -> dict[str, float]:
        clock.now += 0.125
        return {"loss": 1.0}

    Fit(Progress(console=console), epochs=500).run(logs, steps=1)
    said = [line.split()[1] for line in written(console)]
    assert said == [*(f"{epoch}/500" for epoch in range(1, 500, 8)), "500/500"]


def test_an_early_stop_is_said_after_its_epoch() -> None:
    console = plain_console()
    fit = Fit(EarlyStopping("val_loss", patience=1), Progress(console=console), epochs=500)
    fit.run(series("val_loss", [0.1, 0.2]), steps=1)
    said = written(console)
    assert said[-3].startswith("epoch 2/500 ")
    assert said[-2] == "stopped: val_loss did not improve for 1 epoch"
    assert said[-1] == "note: weights of epoch 1 put back: val_loss 0.1"


def test_the_last_epoch_is_said_also_where_the_stop_comes_after_its_line() -> None:
    console = plain_console()
    # Progress comes first, when no one has asked to stop yet.
    fit = Fit(Progress(console=console), EarlyStopping("val_loss", patience=1), epochs=500)
    fit.run(series("val_loss", [0.1, 0.2]), steps=1)
    assert written(console)[-2].startswith("epoch 2/500 ")


def test_a_note_is_said_once() -> None:
    console = plain_console()
    fit = Fit(Progress(console=console), epochs=3)
    fit.state.history.notes.append("of the run that is resumed")
    fit.run(
        lambda epoch: fit.state.history.notes.append(f"epoch {epoch}") or {} if epoch < 2 else {}
    )
    notes = [line for line in written(console) if line.startswith("note")]
    assert notes == ["note: epoch 0", "note: epoch 1"]


def test_it_is_called_about_ten_times_a_second_whatever_a_step_takes(clock: Clock) -> None:
    progress = Progress(console=plain_console())
    fit = Fit(progress, epochs=1)
    calls: list[int] = []
    on_step = progress.on_step
    progress.on_step = lambda state: (calls.append(state.step), on_step(state))[1]  # type: ignore[method-assign]
    fit.call("on_fit_start")
    fit.call("on_epoch_start")
    for _ in range(1000):
        clock.now += 0.001
        fit.step()
    # Steps of a millisecond: 10 calls a second, some more until the pace is known.
    assert 10 <= len(calls) < 16
    assert progress.every in (99, 100)
    # Then 10 steps of 50 ms.
    on_step(fit.state)
    clock.now += 0.5
    fit.state.step += 10
    on_step(fit.state)
    assert progress.every in (1, 2)


@pytest.mark.parametrize("steps", [40, None])
def test_on_a_terminal_a_bar_is_drawn_and_taken_away(clock: Clock, steps: int | None) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    fit = Fit(Progress(console=console), epochs=1, steps=steps)

    def logs(epoch: int) -> dict[str, float]:
        return {"loss": 0.25}

    fit.call("on_fit_start")
    fit.call("on_epoch_start")
    for _ in range(30):
        clock.now += 0.02
        fit.step()
    fit.state.logs = logs(0)
    fit.call("on_epoch_end")
    fit.call("on_fit_end")
    text = "\n".join(written(console))
    assert "samples/s" in text
    assert "input wait 0%" in text
    assert ("ETA 0:0" in text) == (steps is not None)
    # The bar leaves room at its right for what the terminal echoes.
    bars = [part for part in re.split(r"\x1b\[[\d?]*\w|[\r\n]", text) if "input wait" in part]
    assert {len(bar) for bar in bars} == {77}
    # Four a second, and the cursor is shown again.
    assert fit.losses_read == 3
    assert text.endswith("\x1b[?25h") or "\x1b[?25h" in text.split("loss 0.25")[-1]


def test_the_line_of_an_epoch_fits_a_terminal_of_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    logs = {"loss": 0.07097, "accuracy": 0.97583, "val_loss": 0.06671, "val_accuracy": 0.98051}
    Fit(Progress(console=console), epochs=20).run(lambda epoch: {**logs, "seconds": 12.3})
    line = "epoch 20/20  10k samples/s  loss 0.071 val 0.0667  accuracy 0.9758 val 0.9805"
    assert any(said.rstrip().endswith(line) for said in written(console))


def test_the_terminal_is_whole_again_after_an_error() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    fit = Fit(Progress(console=console))
    fit.call("on_fit_start")
    fit.call("on_epoch_start")
    assert "\x1b[?25l" in "".join(written(console))
    fit.call("on_fit_error", RuntimeError())
    assert "\x1b[?25h" in "".join(written(console))


# -- in real fits ----------------------------------------------------------------------------------


class Slope(nn.Module):
    """One weight that training moves by a known amount: the loss falls by its gradient of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def falls(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Loss of slope 1 in training; the validation data turns it around behind -0.23."""
    return torch.where(target == 0, output, (output + 0.23).abs()).mean()


def fit(
    callbacks: list[Callback], epochs: int = 10, run: Path | None = None, **more: Any
) -> tuple[flatout.Trainer, flatout.History]:
    """Ten steps an epoch of 0.01 each: validation is best after epoch 2."""
    trainer = flatout.Trainer(
        Slope(), loss=falls, optimizer=torch.optim.SGD, lr=0.01, run=run, say=lambda line: None
    )
    ones, zeros = torch.ones(40), torch.zeros(40)
    history = trainer.fit(
        (ones, zeros),
        validation_data=(ones[:4], ones[:4]),
        batch_size=4,
        epochs=epochs,
        callbacks=callbacks,
        progress=False,
        **more,
    )
    return trainer, history


def test_a_fit_without_early_stopping_runs_to_its_end() -> None:
    trainer, history = fit([])
    assert len(history.epochs) == 10
    assert trainer.model.weight.item() == pytest.approx(-1.0)


def test_a_fit_stops_early_with_the_best_weights_in_the_users_model() -> None:
    trainer, history = fit([EarlyStopping(patience=2)])
    losses = [logs["val_loss"] for logs in history.epochs]
    assert losses == pytest.approx([0.13, 0.03, 0.07, 0.17])
    assert trainer.model.weight.item() == pytest.approx(-0.2)
    assert trainer.evaluate((torch.ones(4), torch.ones(4)))["loss"] == losses[1]
    assert history.stop_reason == "val_loss did not improve for 2 epochs"
    assert history.notes[-1] == "weights of epoch 2 put back: val_loss 0.03"


def test_a_fit_names_a_figure_that_it_does_not_have() -> None:
    with pytest.raises(ModelError, match="'val_accuracy'; there is: loss, val_loss"):
        fit([EarlyStopping("val_accuracy")])


def test_the_best_checkpoint_of_a_fit_holds_the_best_weights(tmp_path: Path) -> None:
    from flatout.save import Checkpoints

    best = BestCheckpoint()
    fit([best], run=tmp_path / "run")
    saved = Checkpoints(str(tmp_path / "run" / "checkpoints"))
    name = saved.best()
    assert name is not None
    assert best.path is not None
    assert best.path.endswith(name)
    assert saved.load(name).model["weight"].item() == pytest.approx(-0.2)


def test_a_resumed_fit_goes_on_with_its_callbacks(tmp_path: Path) -> None:
    whole_lines, lines_path = tmp_path / "whole", tmp_path / "parts"
    whole_stop, first_stop, second_stop = (EarlyStopping(patience=4) for _ in range(3))
    _, whole = fit([whole_stop, JsonLines(whole_lines, every=3)], run=tmp_path / "a")
    fit([first_stop, JsonLines(lines_path, every=3)], epochs=4, run=tmp_path / "b")
    trainer, parts = fit(
        [second_stop, JsonLines(lines_path, every=3)], run=tmp_path / "b", resume=True
    )
    assert parts.stop_reason == whole.stop_reason == "val_loss did not improve for 4 epochs"
    assert [logs["val_loss"] for logs in parts.epochs] == [
        logs["val_loss"] for logs in whole.epochs
    ]
    # The best epoch lies before the resume, and its weights came along.
    assert second_stop.best_epoch == whole_stop.best_epoch == 2
    assert trainer.model.weight.item() == pytest.approx(-0.2)
    told = [(e["kind"], e["step"], e["loss"]) for e in lines(lines_path)]
    assert told == [(e["kind"], e["step"], e["loss"]) for e in lines(whole_lines)]


def test_a_fit_logs_to_tensorboard(tmp_path: Path) -> None:
    fit([TensorBoard(tmp_path / "events", every=5)], epochs=2)
    assert [step for step, _ in scalars(tmp_path / "events", "step/loss")] == [5, 10, 15, 20]
    assert [value for _, value in scalars(tmp_path / "events", "step/lr")] == [0.01] * 4
    assert len(scalars(tmp_path / "events", "epoch/val_loss")) == 2


def test_a_fit_that_fails_closes_what_is_open() -> None:
    class Fails(Callback):
        def on_step(self, state: FitState) -> None:
            if state.step == 3:
                raise RuntimeError("as asked")

    tracker = Tracker()
    with pytest.raises(RuntimeError, match="as asked"):
        fit([Log(tracker, every=1), Fails()])
    assert [step for step, _ in tracker.logged] == [1, 2, 3]
    assert tracker.closed == 1


def test_every_counts_the_steps_between_calls() -> None:
    class Counts(Callback):
        every = 4
        seen: ClassVar[list[int]] = []

        def on_step(self, state: FitState) -> None:
            self.seen.append(state.step)

    fit([Counts()], epochs=1)
    assert Counts.seen == [4, 8]


def test_a_fit_shows_its_progress_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = flatout.Trainer(Slope(), loss=falls, say=lambda line: None)
    trainer.fit((torch.ones(8), torch.zeros(8)), batch_size=4, epochs=2)
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert re.fullmatch(r"epoch 1/2  [\d.,kM]+ samples/s  loss -?[\d.e-]+  [\d.e-]+ s", first)
    assert second.startswith("epoch 2/2  ")
