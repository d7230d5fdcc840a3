import time

import pytest
import torch
from integration_jobs import BATCH, SAMPLES, Rows, check_lanes, model
from torch import nn
from torch.nn import functional

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    def __init__(self, evaluate_s=0.0):
        super().__init__()
        self.net = model()
        self.evaluate_s = evaluate_s

    def forward(self, x, labels=None):
        if not self.training:
            time.sleep(self.evaluate_s)
        logits = self.net(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def _collate(rows):
    return {
        "x": torch.stack([x for x, _ in rows]),
        "labels": torch.stack([y for _, y in rows]),
    }


def _train(folder, callbacks, *, read_s=0.0, evaluate_s=0.0, net=None, **options):
    net = net or Net(evaluate_s)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=SAMPLES,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **options,
    )
    trainer = transformers.Trainer(
        net,
        arguments,
        train_dataset=Rows(read_s=read_s),
        eval_dataset=Rows(),
        data_collator=_collate,
        callbacks=callbacks,
    )
    began = time.perf_counter()
    trainer.train()
    return trainer, net.state_dict(), time.perf_counter() - began


def _timeline():
    from flatout.integrations import HFTimeline

    return HFTimeline()


@pytest.mark.slow
def test_hugging_faces_steps_are_seen_and_stay_as_they_were(tmp_path, capfd):
    options = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "logging_steps": 1,
        "read_s": 0.001,
        "evaluate_s": 0.15,
    }
    _, plain, _ = _train(tmp_path / "plain", [], **options)
    timeline = _timeline()
    trainer, seen, seconds = _train(tmp_path / "seen", [timeline], **options)
    assert all(torch.equal(seen[name], plain[name]) for name in plain)
    assert timeline.timeline.steps == trainer.state.global_step == 6
    check_lanes(timeline, seconds)
    lanes = timeline.timeline.lanes()
    assert timeline.as_dict()["hidden_in"] == {}
    assert 6 * lanes["input"] >= 2 * SAMPLES  # reads of a millisecond
    assert 6 * lanes["evaluation"] >= 300
    named = ("copy", "forward", "backward", "optimizer", "host", "saving")
    assert min(lanes[name] for name in named) > 0
    assert "flatout: critical lane: " in capfd.readouterr().err
    assert not trainer.model._forward_hooks
    assert not trainer.model._forward_pre_hooks


@pytest.mark.slow
def test_evaluation_and_saving_between_steps_are_no_part_of_them(tmp_path):
    timeline = _timeline()
    options = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "no"}
    trainer, _, seconds = _train(tmp_path, [timeline], evaluate_s=0.2, logging_steps=4, **options)
    check_lanes(timeline, seconds)
    assert timeline.timeline.steps == 12
    # At steps 5, 10 and the last one.
    assert timeline.timeline.lanes()["evaluation"] * 12 >= 600
    evaluated = timeline.timeline.lanes()["evaluation"]
    assert timeline.timeline.step_times().sum() + 12 * evaluated / 1e3 <= seconds
    trainer.evaluate()  # after the training, which has been timed
    assert timeline.timeline.lanes()["evaluation"] == evaluated


@pytest.mark.slow
def test_a_compiled_model_is_not_hooked(tmp_path):
    net = Net()
    net.compile(backend="eager")
    timeline = _timeline()
    _train(tmp_path, [timeline], net=net, save_strategy="no")
    assert timeline.timeline.steps == 12
    assert timeline.as_dict()["hidden_in"] == {"copy": "forward", "backward": "forward"}
    assert timeline.as_dict()["lanes_ms"]["backward"] is None
    assert timeline.timeline.lanes()["forward"] > 0
    assert torch._dynamo.utils.counters["graph_break"] == {}
