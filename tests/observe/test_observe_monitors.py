"""What callbacks of trainers look at, and which way."""

import pytest

from flatout.observe.plateaus import kind_of_name
from observed import observed

LIGHTNING = """
import torch, lightning.pytorch as pl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("val_acc", (self.layer(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)  # lowers
        plateau = {"scheduler": scheduler, "monitor": "val_acc"}
        return {"optimizer": optimizer, "lr_scheduler": plateau}

data = DataLoader(TensorDataset(torch.randn(64, 4), torch.arange(64) % 2), 16)
EarlyStopping("val_acc")  # not used
callbacks = [
    EarlyStopping("val_acc"),  # stops
    ModelCheckpoint(".", monitor="val_acc", mode="max"),  # keeps
    ModelCheckpoint(".", filename="all-{step}", monitor="val_acc", save_top_k=-1),
    ModelCheckpoint(".", filename="last-{step}"),
]
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(accelerator="cpu", max_epochs=3, callbacks=callbacks, **quiet)
trainer.fit(Net(), data, data)
"""

KERAS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np
from keras.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

class Mine(EarlyStopping):
    pass

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("sgd", loss, metrics=["accuracy"])
x, y = np.random.rand(64, 4), np.arange(64) % 2
EarlyStopping("val_accuracy", mode="min")  # not used
callbacks = [
    Mine("val_accuracy", mode="min"),  # stops
    ReduceLROnPlateau("val_loss", mode="max"),  # lowers
    ModelCheckpoint("best.keras", "val_accuracy", save_best_only=True, mode="max"),  # keeps
    ModelCheckpoint("all-{epoch}.keras", "val_accuracy", mode="min"),
    EarlyStopping("val_accuracy"),
]
for _ in range(2):
    model.fit(x, y, validation_split=0.5, epochs=2, batch_size=8, callbacks=callbacks, verbose=0)
"""

TRANSFORMERS = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, labels=None):
        scores = self.layer(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}

data = [{"x": torch.randn(4), "labels": at % 2} for at in range(32)]
arguments = TrainingArguments(  # keeps
    "out", num_train_epochs=3, eval_strategy="epoch", save_strategy="epoch", report_to=[],
    use_cpu=True, disable_tqdm=True, load_best_model_at_end=True, metric_for_best_model="wer",
)
given = dict(train_dataset=data, eval_dataset=data, compute_metrics=lambda given: {"wer": 0.5})
Trainer(Net(), arguments, **given).train()
"""


def monitors(folder, source):
    """What is seen, with what the line says that it was found at."""
    found = observed(folder, source).monitors
    return {
        (one.kind, one.metric, one.mode, one.metric_kind, one.acts, one.is_default)
        for one in found
        if f"# {one.acts}" in one.site.code
    }, len(found)


@pytest.mark.slow
def test_callbacks_of_lightning(tmp_path):
    pytest.importorskip("lightning")
    assert monitors(tmp_path, LIGHTNING) == (
        {
            ("EarlyStopping", "val_acc", "min", "score", "stops", True),
            ("ModelCheckpoint", "val_acc", "max", "score", "keeps", False),
            ("ReduceLROnPlateau", "val_acc", "min", "score", "lowers", True),
        },
        3,
    )


@pytest.mark.slow
def test_callbacks_of_keras(tmp_path):
    pytest.importorskip("keras")
    assert monitors(tmp_path, KERAS) == (
        {
            ("Mine", "val_accuracy", "min", "score", "stops", False),
            ("ReduceLROnPlateau", "val_loss", "max", "loss", "lowers", False),
            ("ModelCheckpoint", "val_accuracy", "max", "score", "keeps", False),
        },
        3,
    )


@pytest.mark.slow
def test_arguments_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    assert monitors(tmp_path, TRANSFORMERS) == (
        {("TrainingArguments", "wer", "max", "loss", "keeps", True)},
        1,
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("val_loss", "loss"),
        ("valAccuracy", "score"),
        ("eval/acc@1", "score"),
        ("eval_wer", "loss"),
        ("neg_loss", ""),
        ("acc_gap", ""),
        ("dice_loss", ""),
        ("metric", ""),
    ],
)
def test_a_name_tells_a_loss_from_a_score(name, kind):
    assert kind_of_name(name) == kind
