import time

import pytest
import torch
from integration_jobs import BATCH, SAMPLES, Rows, check_lanes, model
from torch.nn import functional
from torch.utils.data import DataLoader

from flatout.integrations.step_lanes import describe

pytestmark = pytest.mark.usefixtures("one_thread")

_WHY = "lightning is not installed"


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request):
    return pytest.importorskip(request.param, reason=_WHY)


def _module(pl, manual=False, evaluate_s=0.0):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()
            self.automatic_optimization = not manual

        def training_step(self, batch, index):
            x, y = batch
            loss = functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            if manual:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
            return loss

        def validation_step(self, batch, index):
            time.sleep(1.0 if self.trainer.sanity_checking else evaluate_s)
            self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            if not manual:
                return torch.optim.AdamW(self.parameters(), lr=1e-2)
            first, last = self.net[0].parameters(), self.net[3].parameters()
            return [torch.optim.SGD(first, lr=0.1), torch.optim.SGD(last, lr=0.1)]

    return Module()


def _fit(pl, folder, callbacks, *, manual=False, read_s=0.0, evaluate_s=0.0, **options):
    module = _module(pl, manual, evaluate_s)
    torch.manual_seed(2)
    trainer = pl.Trainer(
        default_root_dir=folder,
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    began = time.perf_counter()
    trainer.fit(
        module,
        DataLoader(Rows(read_s=read_s), batch_size=BATCH, shuffle=True),
        DataLoader(Rows(), batch_size=SAMPLES),
    )
    return trainer, module.state_dict(), time.perf_counter() - began


def _timeline(pl, monkeypatch):
    import importlib
    import sys

    other = {"lightning.pytorch": "pytorch_lightning"}.get(pl.__name__, "lightning.pytorch")
    monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.delitem(sys.modules, "flatout.integrations.lightning", raising=False)
    found = importlib.import_module("flatout.integrations.lightning").LightningTimeline()
    assert isinstance(found, pl.Callback)
    return found


def test_lightnings_steps_are_seen_and_stay_as_they_were(pl, tmp_path, monkeypatch, capfd):
    options = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "read_s": 0.001,
        "evaluate_s": 0.15,
        "check_val_every_n_epoch": 1,
    }
    _, plain, _ = _fit(pl, tmp_path / "plain", [], **options)
    timeline = _timeline(pl, monkeypatch)
    trainer, seen, seconds = _fit(pl, tmp_path / "seen", [timeline], **options)
    assert all(torch.equal(seen[name], plain[name]) for name in plain)
    assert timeline.timeline.steps == trainer.global_step == 6
    # Not counted is the evaluation that Lightning makes before it begins, a long one here.
    check_lanes(timeline, seconds - 1.0)
    lanes = timeline.timeline.lanes()
    assert timeline.as_dict()["hidden_in"] == {}
    assert lanes["sync"] == 0
    assert 6 * lanes["input"] >= 2 * SAMPLES  # reads of a millisecond
    assert 6 * lanes["evaluation"] >= 300
    assert min(lanes[n] for n in ("copy", "forward", "backward", "optimizer", "host")) > 0
    assert lanes["saving"] > 0  # Lightning's own checkpoint at the end of each epoch
    assert "flatout: critical lane: " in capfd.readouterr().err
    assert not {"start", "stop"} & vars(trainer.profiler).keys()


def test_two_optimizers_of_a_manual_step_are_one_step(pl, tmp_path, monkeypatch):
    timeline = _timeline(pl, monkeypatch)
    trainer, _, seconds = _fit(pl, tmp_path, [timeline], manual=True, num_sanity_val_steps=0)
    assert trainer.global_step == 24
    assert timeline.timeline.steps == 12
    check_lanes(timeline, seconds)
    lanes = timeline.timeline.lanes()
    assert min(lanes["forward"], lanes["backward"], lanes["optimizer"]) > 0
    assert timeline.as_dict()["hidden_in"] == {}


def test_the_users_profiler_hears_the_same(pl, tmp_path, monkeypatch):
    timeline = _timeline(pl, monkeypatch)
    trainer, _, _ = _fit(pl, tmp_path, [timeline], profiler="simple")
    assert len(trainer.profiler.recorded_durations["run_training_batch"]) == 12
    assert not {"start", "stop"} & vars(trainer.profiler).keys()


def test_evaluation_within_a_step_is_no_part_of_the_step(pl, tmp_path, monkeypatch):
    timeline = _timeline(pl, monkeypatch)
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "evaluate_s": 0.1}
    _, _, seconds = _fit(pl, tmp_path, [timeline], num_sanity_val_steps=0, **options)
    check_lanes(timeline, seconds)
    assert timeline.timeline.steps == 6
    assert timeline.timeline.lanes()["evaluation"] * 6 >= 400
    inside = timeline.timeline.step_times().sum()
    assert inside + 6 * timeline.timeline.lanes()["evaluation"] / 1e3 <= seconds


def test_a_fit_that_fails_leaves_nothing_behind(pl, tmp_path, monkeypatch):
    class Fails(pl.Callback):
        def on_train_batch_end(self, *args):
            raise RuntimeError("enough")

    timeline = _timeline(pl, monkeypatch)
    with pytest.raises(RuntimeError, match="enough"):
        _fit(pl, tmp_path, [timeline, Fails()])
    assert timeline.timeline.steps == 1
    assert timeline._profiler is None
    assert not timeline._handles
    assert describe(timeline.timeline, {})[0].startswith("step ")
