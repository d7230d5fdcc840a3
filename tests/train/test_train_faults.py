"""What goes wrong is named, and nothing is lost."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from train_jobs import CLASSES, StopAt, convnet, data, images, network, trainer

import flatout
import forked
from flatout.errors import (
    CheckpointError,
    DataError,
    DeviceError,
    ModelError,
    NumbersError,
    RecipeError,
    WorldError,
)
from flatout.measure import fingerprint
from flatout.recipe import Compute, Recipe, World, dump
from flatout.save.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

FULL_DISK = Path(__file__).with_name("scripts_full_disk.py")


def weights(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def fails(job, *given, error, words, **options):
    """The fit fails before its first step, in these words; the model is as it was."""
    before = weights(job.model)
    with pytest.raises(error) as caught:
        job.fit(*given, **{"progress": False, **options})
    for word in [words] if isinstance(words, str) else words:
        assert word in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in job.model.state_dict().items())
    assert job.history is None or job.history.timeline.steps == 0


# -- the disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["asynchronous", pytest.param("waiting", marks=pytest.mark.slow)])
def test_a_full_disk_is_named_and_the_last_good_checkpoint_stays(tmp_path, how):
    run = tmp_path / "run"
    done = forked.run([FULL_DISK, run, "20000", how], tmp_path, os.environ)
    assert done.returncode == 5, done.stderr
    assert "cannot write it: File too large" in done.stdout
    assert str(run / "checkpoints") in done.stdout
    assert "'loss':" in done.stdout
    # An asynchronous save is found out by the next one.
    assert done.stdout.startswith("step 15:" if how == "asynchronous" else "step 10:")
    checkpoints = run / "checkpoints"
    assert [p.name for p in checkpoints.iterdir()] == ["step-000000005"]
    assert Checkpoints(checkpoints).load().step == 5


@pytest.mark.root
def test_a_full_file_system_is_named_and_the_last_good_checkpoint_stays(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], check=True)
    try:

        def fill(state):
            (disk / "filler").write_bytes(b"0" * 380_000)

        x, y = data()
        model = nn.Sequential(nn.Linear(12, 600), nn.Linear(600, CLASSES))
        job = trainer(model, run=disk / "run")
        with pytest.raises(CheckpointError) as caught:
            job.fit((x, y), batch_size=32, epochs=4, callbacks=[StopAt(6, fill)], progress=False)
        assert "No space left on device" in str(caught.value)
        assert str(disk / "run" / "checkpoints") in str(caught.value)
        assert Checkpoints(disk / "run" / "checkpoints").load().step == 5
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_run_folder_that_cannot_be_written_is_named_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    job = trainer(network(), run=tmp_path / "file" / "run")
    fails(job, data(), error=CheckpointError, words=[str(tmp_path / "file"), "choose another path"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write(tmp_path):
    tmp_path.chmod(0o500)
    try:
        job = trainer(network(), run=tmp_path / "run")
        fails(job, data(), error=CheckpointError, words=["Permission denied", str(tmp_path)])
    finally:
        tmp_path.chmod(0o700)


# -- the data ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ((torch.zeros(0, 12), torch.zeros(0, dtype=torch.long)), {}, "the data is empty"),
        (data(samples=5), {"batch_size": 6}, "the batch is larger than the data: batch_size is 6"),
        (data(samples=5), {"batch_size": 0}, "batch_size: expected an int of at least 1, found 0"),
        ((data()[0], data()[1][:-1]), {}, "differ in length: 150 and 149 samples"),
        (([],), {}, "holds no batches"),
        (("data.csv",), {}, "found the path 'data.csv', expected data"),
        ((3,), {}, "nothing here reads int as data"),
    ],
    ids=str,
)
def test_data_that_cannot_be_batches(given, options, words):
    given = given if len(given) == 1 else (given,)
    fails(trainer(network()), *given, error=DataError, words=words, **options)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (
            data()[0][:, :7],
            data()[1],
            ["float32 (32, 7)", "first layer 0 is Linear(in_features=12"],
        ),
        (data()[0].half(), data()[1], ["convert", "to float32, found float16"]),
        (data()[0].long(), data()[1], ["convert", "to float32, found int64"]),
        (data()[0], data()[1].float()[:, None], ["targets float32 (32, 1)"]),
    ],
)
def test_data_that_do_not_fit_the_model(x, y, words):
    fails(trainer(network()), (x, y), error=DataError, words=words, batch_size=32)


def test_a_label_out_of_range_is_named_with_its_sample():
    x, y = data()
    y[77] = CLASSES
    job = trainer(network())
    words = [f"label {CLASSES} is not in 0..{CLASSES - 1}", "sample 77"]
    with pytest.raises(DataError) as caught:
        job.fit((x, y), batch_size=32, progress=False)
    assert all(word in str(caught.value) for word in words)


def test_a_sample_that_cannot_be_read_is_named():
    class Broken(Dataset):
        def __len__(self):
            return 50

        def __getitem__(self, index):
            if index == 31:
                raise OSError("no such picture")
            return torch.zeros(12), 0

    with pytest.raises(DataError, match="sample 31 cannot be read: OSError: no such picture"):
        trainer(network()).fit(Broken(), batch_size=5, shuffle=False, progress=False)


# -- the loss and the numbers --------------------------------------------------------------------


def a_vector(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (a_vector, r"a_vector must return one number or \(sum, weight\), found .*\(32,\)"),
        (lambda output, target: 3.0, "must return one number .* found float"),
        (lambda output, target: None, "must return one number .* found NoneType"),
        (nn.CrossEntropyLoss(reduction="none"), "reduction='none'"),
    ],
)
def test_a_loss_that_is_no_number(loss, words):
    with pytest.raises(ModelError, match=words):
        trainer(network(), loss=loss).fit(data(), batch_size=32, progress=False)


@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_in_the_data_stops_before_it_reaches_the_weights(fused):
    x, y = data()
    x[123, 4] = float("nan")
    model = network(dropout=0, norm=False)
    before = []

    class Remember(flatout.Callback):
        def on_step(self, state):
            before[:] = [weights(state.model), state.step]

    job = trainer(model, optimizer=lambda p: torch.optim.Adam(p, lr=2e-3, fused=fused), seed=1)
    with pytest.raises(NumbersError) as caught:
        job.fit((x, y), batch_size=10, epochs=2, callbacks=[Remember()], progress=False)
    kept, steps = before
    message = str(caught.value)
    assert 0 < steps < 15
    assert f"step {steps + 1}, learning rate 0.002" in message
    assert re.search(r"input.*sample 123$", message, re.MULTILINE)
    assert "the weights are those before this step" in message
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())


def test_a_nan_that_the_model_makes_names_the_module_and_the_samples():
    class Root(nn.Module):
        def forward(self, x):
            return x.sqrt()  # of negative numbers too

    model = nn.Sequential(nn.Linear(12, CLASSES), Root())
    with pytest.raises(NumbersError) as caught:
        trainer(model).fit(data(), batch_size=10, progress=False)
    assert "step 1, learning rate 0.001" in str(caught.value)
    assert re.search(r"samples( \d+,){5} \.\.\. \(10 in all\)", str(caught.value))
    assert "module 1 (Root)" in str(caught.value)


def test_broken_statistics_are_named_before_they_are_saved(tmp_path):
    """BatchNorm's running variance of one sample is NaN while the loss is fine."""
    model = network()

    def spoil(state):
        state.model[1].running_var[0] = float("nan")

    job = trainer(model, run=tmp_path / "run")
    with pytest.raises(NumbersError, match=r"buffer 1\.running_var") as caught:
        job.fit(data(), epochs=2, callbacks=[StopAt(7, spoil)], progress=False)
    assert "found before saving" in str(caught.value)
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().step == 5


def test_a_loss_that_is_nan_without_gradients_is_found_at_the_end_of_the_epoch():
    def loss(output, target):
        value = nn.functional.cross_entropy(output, target)
        return value + torch.tensor(float("nan"))  # the gradient of a sum does not see it

    job = trainer(network(), loss=loss)
    with pytest.raises(NumbersError, match="mean loss of epoch 1 is nan, though gradients were"):
        job.fit(data(), progress=False)


# -- the request ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("WORLD_SIZE", "RANK"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_SIZE", "PMI_RANK"),
    ],
)
def test_several_ranks_of_which_too_little_is_known_are_refused(monkeypatch, name, missing):
    monkeypatch.setenv(name, "2")
    job = trainer(network())
    with pytest.raises(WorldError, match=f"expected the environment variable {missing}"):
        job.fit(data(), progress=False)
    monkeypatch.delenv(name)
    job.fit(data(), progress=False)


def elsewhere(tmp_path):
    """A resolved Recipe of another machine, as a file."""
    job = trainer(network(), recipe=Recipe(compute=Compute(precision="bf16"), save={"every": 7}))
    job.fit(data(), progress=False)
    other = job.resolved.model_copy(update={"machine": {**fingerprint().as_dict(), "cpus": 4711}})
    dump(other, tmp_path / "recipe.toml")
    return tmp_path / "recipe.toml", other


def test_a_recipe_from_another_machine_is_decided_again_and_says_so(tmp_path, monkeypatch):
    path, other = elsewhere(tmp_path)
    given = {"by hand": other, "by file": None}
    for how, recipe in given.items():
        if how == "by file":
            monkeypatch.setenv("FLATOUT_RECIPE", str(path))
        said = []
        job = flatout.Trainer(network(), recipe=recipe, allow="exact", say=said.append)
        job.fit(data(), progress=False)
        assert said[0].startswith("the Recipe is from another machine (cpus: 4711 where it was")
        assert said[0].endswith("): settings are decided again")
        assert job.resolved.compute.precision == "fp32"
        assert job.resolved.save.every == 7  # no measurement is behind it


def test_a_recipe_from_this_machine_holds_as_it_is(tmp_path, monkeypatch):
    job = trainer(network(), recipe=Recipe(compute=Compute(precision="bf16")))
    job.fit(data(), progress=False)
    dump(job.resolved, tmp_path / "recipe.toml")
    monkeypatch.setenv("FLATOUT_RECIPE", str(tmp_path / "recipe.toml"))
    said = []
    again = flatout.Trainer(network(), say=said.append)
    again.fit(data(), progress=False)
    assert said == []
    assert again.resolved.request() == job.resolved.request()


def test_set_wins_over_code_over_file(tmp_path, monkeypatch):
    dump(Recipe(save={"keep_last": 5, "every": 4}), tmp_path / "recipe.toml")
    monkeypatch.setenv("FLATOUT_RECIPE", str(tmp_path / "recipe.toml"))
    monkeypatch.setenv("FLATOUT_SET", json.dumps(["save.every=2", "compute.precision=fp32"]))
    code = Recipe(compute=Compute(precision="bf16"), save={"every": 3})
    job = trainer(network(), recipe=code, run=tmp_path / "run")
    job.fit(data(), batch_size=32, progress=False)
    resolved = job.resolved
    assert resolved.save.every == 2
    assert resolved.save.keep_last == 5
    assert resolved.compute.precision == "fp32"
    names = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["step-000000002", "step-000000004", "step-000000005"]


def test_a_bad_setting_is_named_with_the_allowed_ones(monkeypatch):
    monkeypatch.setenv("FLATOUT_SET", json.dumps(["compute.precision=fp8"]))
    with pytest.raises(RecipeError, match=r"compute\.precision.*fp8(.|\n)*bf16"):
        trainer(network())


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="cuda:1 is here")
def test_a_device_that_is_not_here_is_replaced_and_said_or_refused():
    said = []
    soft = Recipe(world=World(device="cuda:1"))
    job = flatout.Trainer(network(), recipe=soft, allow="exact", say=said.append)
    job.fit(data(), progress=False)
    assert said[0].startswith(f"running on {job.loop.device} instead of cuda:1, which cannot be")
    assert job.resolved.world.device == "cuda:1" or job.resolved.world.device == "cpu"
    strict = Recipe(world=World(device="cuda:1", placement="strict"))
    fails(
        trainer(network(), recipe=strict),
        data(),
        error=DeviceError,
        words="cuda:1 is asked for and cannot be used",
    )


def test_a_setting_that_does_not_run_here_is_an_error_of_the_first_step():
    """An explicit request is not replaced in silence."""

    class Refuses(nn.Module):
        def forward(self, x):
            if x.dtype == torch.bfloat16:
                raise RuntimeError("no bf16 in here")
            return x

    model = nn.Sequential(nn.Linear(12, CLASSES), Refuses())
    job = trainer(model, recipe=Recipe(compute=Compute(precision="bf16")))
    with pytest.raises(RuntimeError, match="no bf16 in here"):
        job.fit(data(), progress=False)


def test_after_a_failure_the_model_is_the_users_again(tmp_path):
    """Rewrites and settings are taken back when preparing fails after they were made."""
    x, y = images()
    run = tmp_path / "run"
    recipe = Recipe(compute=Compute(rewrites="on", deterministic=True))

    class Torn(flatout.Callback):
        def state_dict(self):
            return {"whole": True}

        def load_state_dict(self, state):
            raise CheckpointError("torn")

    options = {"callbacks": [Torn()], "progress": False}
    trainer(convnet(), recipe=recipe, run=run).fit((x, y), **options)
    model = convnet()
    layers = [type(m) for m in model]
    job = trainer(model, recipe=recipe, run=run)
    with pytest.raises(CheckpointError, match="torn"):
        job.fit((x, y), resume=True, **options)
    assert [type(m) for m in model] == layers
    assert not torch.are_deterministic_algorithms_enabled()
