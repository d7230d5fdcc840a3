"""One rank, two and three give the same gradients, losses, metrics, weights and predictions."""

import pytest
import torch
from world_ranks import run

# Each world is started once for all cases, which takes most of a minute.
pytestmark = pytest.mark.slow

JOB = '''
    import sys
    from pathlib import Path

    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torchmetrics.classification import MulticlassF1Score

    import flatout
    from flatout.world import place

    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    rng = np.random.default_rng(1)
    x = rng.normal(size=(101, 20)).astype(np.float32)
    y = rng.integers(0, 5, 101)
    weights = rng.random(101).astype(np.float32)
    words, tags = rng.integers(0, 30, (47, 9)), rng.integers(0, 4, (47, 9))
    tags[rng.random((47, 9)) < 0.4] = -100  # ignored, and not equally many in each part
    text = folder / "rows.svm"
    if not text.exists():
        pairs = [" ".join(f"{i + 1}:{v:.4f}" for i, v in enumerate(row)) for row in x]
        lines = [f"{label} {row}" for label, row in zip(y, pairs)]
        own = folder / f"rows.{size}.{place().rank}"
        own.write_text("\\n".join(lines) + "\\n")
        own.rename(text)


    def layers():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))


    def normed(momentum=0.1):
        torch.manual_seed(0)
        # A bias before it has no gradient but rounding, of which Adam would make steps.
        norm = nn.BatchNorm1d(32, momentum=momentum)
        return nn.Sequential(nn.Linear(20, 32, bias=False), norm, nn.ReLU(), nn.Linear(32, 5))


    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Sequential(
                nn.Conv2d(1, 4, 3, bias=False),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(24, 5),
            )

        def forward(self, x):
            return self.inner(x.reshape(-1, 1, 4, 5))


    def dropping():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(20, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 5), nn.AlphaDropout(0.1)
        )


    class DroppedPixels(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Sequential(
                nn.Conv2d(1, 8, 3), nn.Dropout2d(0.4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
                nn.Linear(48, 5),
            )

        def forward(self, x):
            return self.inner(x.reshape(-1, 1, 4, 5))


    class DroppedTagger(nn.Module):
        """Time before samples, and dropped attention; biases of keys would follow rounding."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.tags = nn.Embedding(30, 16), nn.Linear(16, 4)
            self.mix = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, bias=False)
            self.read = nn.GRU(16, 8, 2, dropout=0.3, bidirectional=True)

        def forward(self, words):
            found, _ = self.read(self.mix(self.words(words).transpose(0, 1)))
            return self.tags(found).permute(1, 2, 0)


    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.tags = nn.Embedding(30, 16), nn.Linear(16, 4)

        def forward(self, words):
            return self.tags(self.words(words)).transpose(1, 2)


    class Branches(nn.Module):
        """Which parameters are used depends on the samples, so on the rank too."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other, self.never = nn.Linear(20, 5), nn.Linear(20, 5), nn.Linear(20, 5)

        def forward(self, x):
            out = self.one(x)
            rows = x[:, 0] > 1
            if rows.any():
                out = out.masked_scatter(rows[:, None], out[rows] + self.other(x[rows]))
            return out


    def job(model, data, batch_size=10, metrics=("accuracy",), epochs=2, **given):
        given = {"allow": "exact", **given}
        trainer = flatout.Trainer(model, metrics=metrics, lr=0.01, **given)
        history = trainer.fit(data, batch_size=batch_size, epochs=epochs, progress=False)
        figures = [{k: v for k, v in epoch.items() if k != "seconds"} for epoch in history.epochs]
        return trainer, figures


    def everything(name, trainer, figures, inputs=x, targets=y):
        found[name] = {
            "weights": {k: v.clone() for k, v in trainer.model.state_dict().items()},
            "history": figures,
            "evaluation": trainer.evaluate(inputs, targets),
            "prediction": trainer.predict(inputs),
        }


    found = {}
    everything("plain", *job(layers(), (x, y)))
    everything("batches smaller than the world", *job(layers(), (x, y), batch_size=2, epochs=1))
    everything("accumulated and clipped", *job(layers(), (x, y), accumulate=3, clip_norm=0.1))
    everything("weighted", *job(layers(), (x, y, weights)))
    everything("ignored targets", *job(Tagger(), (words, tags)), words, tags)
    everything("branches", *job(Branches(), (x, y), batch_size=7))
    half = flatout.Recipe().replace({"compute.precision": "bf16"})
    everything("bf16", *job(layers(), (x, y), recipe=half))
    pieces = flatout.Recipe().replace({"memory.micro_batch": 3})
    everything("micro-batches", *job(layers(), (x, y), recipe=pieces))
    scores = [MulticlassF1Score(num_classes=5, average="macro"), "accuracy"]
    everything("torchmetrics", *job(layers(), (x, y), metrics=scores))
    two = (x[:, :1], (y > 2).astype(np.float32)[:, None])
    torch.manual_seed(0)
    given = {"loss": "binary_cross_entropy", "metrics": ["auc"]}
    everything("auc", *job(nn.Linear(1, 1), two, **given), *two)
    loader = DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=10)
    everything("loader", *job(layers(), loader, batch_size=None))
    rows = flatout.data.libsvm(text).map(lambda i, t: (i.float(), t)).shuffle(seed=4).batch(10)
    everything("pipeline", *job(layers(), rows, batch_size=None))
    # One sample in the last batch: of a larger world some ranks have filling alone.
    rows = flatout.data.libsvm(text).map(lambda i, t: (i.float(), t)).shuffle(seed=4)
    rows = rows.batch(10, last="pad")
    everything("padded", *job(layers(), rows, batch_size=None), rows, None)

    def own_loss(output, target):
        return torch.nn.functional.cross_entropy(output, target)

    given = {"loss": own_loss, "batch_size": None}
    trainer, figures = job(layers(), rows, **given)
    everything("padded, a loss of one's own", trainer, figures, rows, None)
    found["samples"] = trainer.history.timeline.step_samples().tolist()
    even = (x[:100], y[:100])  # the last batch has two samples: one for each rank, or too few
    everything("batch norm", *job(normed(), even, batch_size=7), *even)
    everything("batch norm, all batches alike", *job(normed(None), even, batch_size=7), *even)
    everything("batch norm of images", *job(Pixels(), (x, y)))
    few = (x[:99], y[:99])
    # In float64, because three values that are nearly the same make rounding large.
    double = (few[0].astype(np.float64), few[1])
    everything("batch norm, one sample a part", *job(normed().double(), double, 3), *double)
    # Statistics are those of a piece, so another World learns something else; but none waits.
    everything("batch norm in pieces", *job(normed(), even, recipe=pieces), *even)
    try:
        job(normed(), (x[:11], y[:11]))  # the last batch has a single sample
    except ValueError as error:
        found["batch norm of one value"] = str(error).startswith("the last batch of an epoch")
    said = []
    # Measured on parts of one sample.
    job(normed(), few, batch_size=3, allow="tolerant", say=said.append)
    found["measured"] = said
    keyed = flatout.Recipe().replace({"compute.dropout": "by_sample"})
    everything("dropout", *job(dropping(), (x, y), recipe=keyed))
    small = {"batch_size": 2, "epochs": 1, "recipe": keyed}
    everything("dropout, small batches", *job(dropping(), (x[:20], y[:20]), **small))
    rows = flatout.data.libsvm(text).map(lambda i, t: (i.float(), t)).shuffle(seed=4).batch(10)
    given = {"recipe": keyed.replace({"memory.micro_batch": 2}), "accumulate": 3, "epochs": 1}
    everything("dropout, accumulated", *job(dropping(), rows, batch_size=None, **given))
    everything("dropout of images", *job(DroppedPixels(), (x, y), recipe=keyed, epochs=1))
    given = {"recipe": keyed, "batch_size": 8, "epochs": 1}
    everything("dropout of time", *job(DroppedTagger(), (words, tags), **given), words, tags)
    torch.save(found, folder / f"found-{size}-{place().rank}.pt")
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for size in (1, 2, 3):
        run(JOB, size, folder)
    return {
        (size, rank): torch.load(folder / f"found-{size}-{rank}.pt")
        for size in (1, 2, 3)
        for rank in range(size)
    }


CASES = (
    "plain",
    "batches smaller than the world",
    "accumulated and clipped",
    "weighted",
    "ignored targets",
    "branches",
    "bf16",
    "micro-batches",
    "torchmetrics",
    "auc",
    "loader",
    "pipeline",
    "padded",
    "padded, a loss of one's own",
    "batch norm",
    "batch norm, all batches alike",
    "batch norm of images",
    "batch norm, one sample a part",
    "dropout",
    "dropout, small batches",
    "dropout, accumulated",
    "dropout of images",
    "dropout of time",
)


@pytest.mark.parametrize("case", CASES)
def test_the_same_on_any_world(found, case):
    alone = found[1, 0][case]
    # Of a gradient that is rounding alone Adam makes a part of a step, which is 1e-2 here.
    for size, rank in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
        one = found[size, rank][case]
        for key in ("weights", "history", "evaluation", "prediction"):
            close = {"rtol": 1e-4, "atol": 5e-5 if key == "weights" else 2e-6}
            if case == "bf16":
                close = {"rtol": 2e-2, "atol": 2e-2}
            torch.testing.assert_close(one[key], alone[key], **close)


@pytest.mark.parametrize("case", [*CASES, "batch norm in pieces"])
def test_all_ranks_have_the_same_bits(found, case):
    for size, rank in ((2, 1), (3, 1), (3, 2)):
        one, first = found[size, rank][case], found[size, 0][case]
        for key in ("weights", "history", "evaluation", "prediction"):
            torch.testing.assert_close(one[key], first[key], rtol=0, atol=0)


def test_what_fills_a_batch_up_is_no_sample(found):
    plain = found[1, 0]["pipeline"]
    for one in found.values():
        for case in ("padded", "padded, a loss of one's own"):
            torch.testing.assert_close(one[case]["weights"], plain["weights"], rtol=1e-4, atol=5e-5)
            assert len(one[case]["prediction"]) == 101
        assert one["samples"] == [*[10] * 10, 1] * 2


def test_a_batch_of_one_value_is_refused_by_batch_norm_on_any_world(found):
    assert all(one["batch norm of one value"] for one in found.values())


def test_settings_are_measured_where_a_part_is_one_sample(found):
    for size in (1, 2, 3):
        (line,) = [line for line in found[size, 0]["measured"] if line.startswith("auto: ")]
        assert "fails" not in line
