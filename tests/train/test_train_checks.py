import os
import platform
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatout
import forked
from flatout.data.batches.batch import Batch
from flatout.errors import DataError, ModelError
from flatout.train.checks import check_first_batch, check_labels, check_targets, describe
from flatout.train.compute import ModelCompute
from flatout.train.losses.losses import as_loss


def batch(x, y, indices=None):
    return Batch(x, y, None, indices, len(y))


def checked(model, x, y, loss="cross_entropy", indices=None):
    compute = ModelCompute(model, as_loss(loss), (), unweighted=False)
    check_first_batch(model, compute, [batch(x, y, indices)])


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


X, Y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1])


def test_a_batch_that_fits_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    checked(model, X, Y)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.float16])
def test_inputs_of_another_dtype(dtype):
    with pytest.raises(DataError) as caught:
        checked(network(), X.to(dtype), Y)
    name = str(dtype).removeprefix("torch.")
    assert caught.value.do == f"convert inputs to float32, found {name}"
    assert f"inputs {name} (5, 4), targets int64 (5,)" in caught.value.where
    assert "first layer 0 is Linear(in_features=4, out_features=8" in caught.value.where


def test_a_misfit_of_shapes_is_no_matter_of_dtypes():
    """Which the Trainer converts: float64, and images as bytes."""
    with pytest.raises(DataError, match="shapes cannot be multiplied") as caught:
        checked(nn.Linear(9, 3).double(), X.double(), Y)
    assert caught.value.do.startswith("compare the shapes")
    trainer = flatout.Trainer(nn.Linear(9, 3), say=lambda line: None)
    with pytest.raises(DataError, match="shapes cannot be multiplied") as caught:
        trainer.fit(X.double(), Y, progress=False)
    assert caught.value.do.startswith("compare the shapes")


def test_one_of_several_inputs_of_another_dtype():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, a, b):
            return self.linear(a) + self.linear(b)

    with pytest.raises(DataError) as caught:
        checked(Two(), (X, X.double()), Y)
    assert caught.value.do == "convert inputs[1] to float32, found float64"


def test_a_dict_of_inputs_for_a_forward_that_has_other_names():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, batch):
            return self.linear(batch["x"])

    with pytest.raises(DataError, match="unexpected keyword argument 'x'") as caught:
        checked(Whole(), {"x": X, "labels": Y}, Y)
    assert "by name: let forward take x, labels; give targets next to the dict" in caught.value.do


def test_inputs_of_another_shape():
    with pytest.raises(DataError, match=r"\(5x3 and 4x8\)") as caught:
        checked(network(), X[:, :3], Y)
    assert "inputs float32 (5, 3)" in caught.value.where
    assert "first layer 0 is Linear" in caught.value.where
    assert "shapes" in caught.value.do


def test_images_without_channels():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    with pytest.raises(DataError) as caught:
        checked(model, torch.randn(5, 28, 28), Y)
    assert "inputs float32 (5, 28, 28)" in caught.value.where
    assert "first layer 0 is Conv2d(1, 2" in caught.value.where


def test_integer_inputs_of_an_embedding_are_right():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    checked(model, torch.randint(0, 9, (5, 2)), Y)
    with pytest.raises(DataError, match=r"id 9 is not in 0\.\.8, .* table 0") as caught:
        checked(model, torch.full((5, 2), 9), Y)
    assert caught.value.where == "inputs, column 0, row 0 of the batch"


# -- targets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "message", "where"),
    [
        ([0, 1, 3, 9, 0], "label 3 is not in 0..2", "sample 32"),
        ([0, -1, 2, 0, 0], "label -1 is not in 0..2", "sample 31"),
        ([0, -100, 2, 0, 255], "label 255 is not in 0..2", "sample 34"),
    ],
)
def test_labels_out_of_range(labels, message, where):
    with pytest.raises(DataError) as caught:
        checked(network(), X, torch.tensor(labels), indices=torch.arange(30, 35))
    assert (caught.value.what, caught.value.where) == (message, where)
    assert "3 classes" in caught.value.do


def test_labels_of_pixels_and_without_numbers():
    labels = torch.zeros(5, 2, 2, dtype=torch.int64)
    labels[3, 1, 0] = 7
    with pytest.raises(DataError, match=r"label 7 is not in 0\.\.3") as caught:
        check_labels(labels, 4, None)
    assert caught.value.where == "row 3 of the batch"
    check_labels(labels, 8, None)
    check_labels(labels, 4, None, ignore_index=7)


def test_a_label_that_the_loss_ignores():
    loss = nn.CrossEntropyLoss(ignore_index=255)
    checked(network(), X, torch.tensor([0, 255, 2, 0, 1]), loss)
    with pytest.raises(DataError, match="label -100"):
        checked(network(), X, torch.tensor([0, -100, 2, 0, 1]), loss)


@pytest.mark.parametrize("bad", [2.0, -1.0])
def test_probabilities_out_of_range(bad):
    model = nn.Linear(4, 1)
    y = torch.tensor([0.0, 1.0, bad, 0.5, 0.0])
    with pytest.raises(DataError, match=rf"target {bad:g} is not in 0\.\.1") as caught:
        checked(model, X, y, "binary_cross_entropy", torch.arange(10, 15))
    assert caught.value.where == "sample 12"
    assert "cross_entropy" in caught.value.do
    with pytest.raises(DataError, match=r"target 2 is not in 0\.\.1"):
        checked(model, X, torch.tensor([0, 1, 2, 0, 0]), "binary_cross_entropy")


def test_labels_as_floats():
    with pytest.raises(
        DataError, match="the loss cross_entropy does not take this batch"
    ) as caught:
        checked(network(), X, Y.float())
    assert caught.value.do == "convert the targets to int64 class numbers, found float32"
    assert "output float32 (5, 3)" in caught.value.where
    assert "targets float32 (5,)" in caught.value.where


def test_an_output_of_another_shape():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(x)[:2]

    with pytest.raises(DataError) as caught:
        checked(Mean(), X, Y)
    assert "output float32 (2, 3)" in caught.value.where
    assert caught.value.do == "the model returns 2 rows for 5 samples"
    with pytest.raises(ModelError, match=r"output \(5, 3\) and target \(5,\) differ in shape"):
        checked(network(), X, Y.float(), "mse")


def test_targets_in_a_column():
    with pytest.raises(DataError, match="does not take this batch") as caught:
        checked(network(), X, Y[:, None])
    assert "targets int64 (5, 1)" in caught.value.where


def test_a_model_that_returns_several_things():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(x), x

    with pytest.raises(ModelError, match="compares one tensor with one tensor, found output tuple"):
        checked(Two(), X, Y)


# -- what is not the data's fault ------------------------------------------------------------------


def test_a_mistake_in_the_model_shows_as_it_is():
    class Broken(nn.Module):
        def forward(self, x):
            return self.not_there(x)

    with pytest.raises(AttributeError, match="not_there"):
        checked(Broken(), X, Y)


def test_memory_that_runs_out_is_left_to_the_step():
    class Hungry(nn.Module):
        def forward(self, x):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        checked(Hungry(), X, Y)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.ones(2), r"float32 \(2,\)"),
        (torch.tensor(1), r"int64 \(\)"),
        (3.0, "float"),
        (None, "None"),
        ((torch.ones(3), 2), r"float32 \(3,\)"),
    ],
)
def test_a_compute_that_gives_no_loss(value, found):
    with pytest.raises(ModelError, match=f"must return a loss.*found {found}"):
        check_first_batch(network(), lambda batch: value, [batch(X, Y)])


@pytest.mark.parametrize("value", [torch.tensor(1.0), (torch.tensor(1.0), 3), torch.ones(1)])
def test_a_compute_that_gives_a_loss(value):
    check_first_batch(network(), lambda batch: value, [batch(X, Y)])


def test_targets_that_are_no_labels_are_not_looked_at():
    check_targets(as_loss("mse"), X, batch(X, Y * 100.0))
    check_targets(as_loss("cross_entropy"), X, batch(X, X.softmax(1)))
    check_targets(as_loss(lambda o, t: o.sum()), X, batch(X, Y * 100))
    check_targets(as_loss("cross_entropy"), {"a": X}, batch(X, Y))


def test_a_batch_in_words():
    nested = Batch({"a": X, "b": (Y, X)}, None, None, None, 5)
    assert describe(nested) == ("inputs float32 (5, 4), int64 (5,), float32 (5, 4), targets none")


def test_a_custom_loss_that_fails():
    def mine(output, target):
        return F.mse_loss(output @ target[:, None], target)

    with pytest.raises(DataError, match="the loss mine does not take this batch"):
        checked(network(), X, Y.float(), mine)


LSTM_IN_BF16 = """
    import torch
    from torch import nn

    import flatout
    from flatout.errors import DeviceError


    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.last = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            return self.last(self.lstm(x)[0][:, -1])


    x, y = torch.randn(16, 5, 4), torch.arange(16) % 2
    quiet = {"say": lambda line: None}
    bf16 = flatout.Trainer(Reads(), recipe=flatout.Recipe(compute={"precision": "bf16"}), **quiet)
    try:
        bf16.fit((x, y), batch_size=8)
    except DeviceError as error:
        print(error)
    fp32 = flatout.Trainer(Reads(), recipe=flatout.Recipe(compute={'precision': 'fp32'}), **quiet)
    print(len(fp32.fit((x, y), batch_size=8).epochs))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are of x86")
def test_a_kernel_that_the_cpu_lacks_is_named(tmp_path):
    """Run as on a CPU without AVX-512, for which oneDNN has no LSTM in bf16."""
    script = tmp_path / "lstm.py"
    script.write_text(textwrap.dedent(LSTM_IN_BF16))
    result = forked.run([script], tmp_path, {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert result.returncode == 0, result.stderr
    assert "this CPU has no bf16 kernel" in result.stdout
    assert "Recipe(compute={'precision': 'fp32'})" in result.stdout
    assert result.stdout.strip().endswith("1")
