"""The Trainer and the Loop on one GPU, against the loop that one writes by hand there."""

from __future__ import annotations

import copy
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import flatout
from flatout.data.randomness import order
from flatout.data.workers.prefetch import prefetch
from flatout.errors import NumbersError
from flatout.measure import finish_device, machine_rates
from flatout.recipe import Compute, Recipe, Save, World
from flatout.train.graphs.graphs import graphs_of
from flatout.train.terms import Terms

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

FEATURES, CLASSES, SAMPLES = 12, 3, 150
DROPS = {"dropout": 0.3}


def quiet(_line):
    """What says nothing, for `say`."""


def data(samples=SAMPLES):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples, FEATURES, generator=draw)
    return x, (x @ torch.randn(FEATURES, CLASSES, generator=draw)).argmax(1)


def images(samples=96, side=12):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, side, side, generator=draw)
    return x, torch.randint(0, CLASSES, (samples,), generator=draw)


def network(*, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(dropout) if dropout else nn.Identity(),
        nn.Linear(16, CLASSES),
    )


def linear():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), lr=1e-2, **options)


def by_hand(
    model, optimizer, x, y, device, *, batch_size=32, epochs=2, clip=None, scheduler=None, steps=1
):
    """The plain loop on the device; `steps` batches make an optimizer step."""
    x, y = x.to(device), y.to(device)
    model.train()
    means = []
    for epoch in range(epochs):
        at_epoch = torch.from_numpy(order(len(x), 0, epoch)).to(device)
        total = torch.zeros((), device=device)
        whole = batch_size * steps
        for start in range(0, len(x), whole):
            at = at_epoch[start : start + whole]
            optimizer.zero_grad()
            value = F.cross_entropy(model(x[at]), y[at])
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            total += value.detach() * len(at)
            if scheduler is not None:
                scheduler.step()
        means.append(float(total) / len(x))
    return means


def recipe(device, **compute):
    return Recipe(compute=Compute(**compute), world=World(device=str(device)))


def trainer(model, device, **options):
    given = {"allow": "exact", "say": quiet, "recipe": recipe(device), **options}
    return flatout.Trainer(model, **given)


def pair(make, device, optimizer=adam):
    """The same model twice, one on the device, each with its optimizer."""
    ours, theirs = make(), make().to(device)
    return ours, theirs, optimizer(ours), optimizer(theirs)


def check_same(ours, theirs):
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a.cpu(), b.cpu()), name


def check_close(ours, theirs, within):
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=within, atol=within, msg=name)


# -- a fit is the plain loop -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        adam,
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1, amsgrad=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
        lambda m: adam(m, fused=True),
    ],
    ids=["Adam", "AdamW", "SGD", "RMSprop", "fused"],
)
def test_an_exact_fit_is_the_loop_by_hand_bit_for_bit(device, optimizer):
    x, y = data()
    ours, theirs, ours_with, theirs_with = pair(lambda: network(**DROPS), device, optimizer)
    torch.manual_seed(7)
    losses = by_hand(theirs, theirs_with, x, y, device, epochs=3)
    torch.manual_seed(7)
    job = trainer(ours, device, optimizer=ours_with)
    history = job.fit((x, y), batch_size=32, epochs=3, progress=False)
    assert next(ours.parameters()).device == device
    check_same(ours, theirs)
    assert history.history["loss"] == pytest.approx(losses, rel=1e-5)


def test_a_schedule_and_clipping_are_those_of_the_loop_by_hand(device):
    x, y = data()
    ours, theirs, ours_with, theirs_with = pair(network, device)

    def cycle(optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=15)

    by_hand(theirs, theirs_with, x, y, device, epochs=3, clip=0.5, scheduler=cycle(theirs_with))
    options = {"scheduler": cycle, "schedule_every": "step", "clip_norm": 0.5}
    job = trainer(ours, device, optimizer=ours_with, **options)
    job.fit((x, y), batch_size=32, epochs=3, progress=False)
    check_same(ours, theirs)


@pytest.mark.parametrize("make", [network, convnet])
def test_by_default_it_is_the_loop_by_hand_to_rounding(device, make):
    x, y = data(640) if make is network else images(320)
    ours, theirs, ours_with, theirs_with = pair(
        make, device, lambda m: torch.optim.SGD(m.parameters(), lr=0.05)
    )
    losses = by_hand(theirs, theirs_with, x, y, device, batch_size=16, epochs=12)
    said = []
    job = trainer(ours, device, optimizer=ours_with, allow="tolerant", say=said.append)
    history = job.fit((x, y), batch_size=16, epochs=12, progress=False)
    assert history.history["loss"][0] == pytest.approx(losses[0], rel=0.05)
    assert history.history["loss"][-1] == pytest.approx(losses[-1], rel=0.2, abs=0.05)
    assert history.timeline.steps == 12 * len(x) // 16
    if device.type == "cuda":
        told = " ".join([*said, *history.notes, history.recipe.summary()])
        for word in ("threads", "allocator", "page fault", "oneDNN", "AVX"):
            assert word not in told


def test_accumulated_batches_are_one_large_batch(device):
    x, y = data(160)
    ours, theirs, ours_with, theirs_with = pair(
        linear,
        device,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )
    by_hand(theirs, theirs_with, x, y, device, batch_size=16, steps=2)
    job = trainer(ours, device, optimizer=ours_with, accumulate=2)
    job.fit((x, y), batch_size=16, epochs=2, progress=False)
    check_close(ours, theirs, 1e-5)


@pytest.mark.parametrize("captured", ["off", "on"])
def test_a_loop_of_ones_own_is_the_loop_by_hand(device, captured):
    x, y = data()
    ours, theirs, ours_with, theirs_with = pair(lambda: network(**DROPS), device)
    torch.manual_seed(7)
    by_hand(theirs, theirs_with, x, y, device)
    torch.manual_seed(7)
    source = flatout.data.as_source((x, y), batch_size=32)
    asked = recipe(device, cuda_graph=captured)
    loop = flatout.Loop(recipe=asked, allow="exact", say=quiet)

    def compute(batch):
        return F.cross_entropy(ours(batch.inputs), batch.targets)

    loop.prepare(ours, ours_with, data=source, compute=compute)
    for _ in loop.epochs(2):
        for batch in loop.batches(source):
            assert batch.inputs.device == device
            loop.step(compute, batch)
    if device.type == "cuda" and captured == "on":
        assert graphs_of(loop.stepper).cuda.why == ""
    loop.close()
    check_same(ours, theirs)


def test_evaluate_and_predict_are_those_of_torch(device):
    x, y = data()
    model = network()
    job = trainer(model, device, metrics=["accuracy"])
    job.fit((x, y), batch_size=32, epochs=1, progress=False)
    model.eval()
    with torch.no_grad():
        outputs = model(x.to(device)).cpu()
    found = job.evaluate((x, y), batch_size=64)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(outputs, y)), rel=1e-4)
    right = float((outputs.argmax(1) == y).float().mean())
    assert found["accuracy"] == pytest.approx(right, abs=0.011)
    predicted = job.predict(x, batch_size=64)
    assert predicted.device.type == "cpu"
    torch.testing.assert_close(predicted, outputs, rtol=1e-4, atol=1e-4)


def test_validation_callbacks_and_weights_of_samples(device):
    x, y = data()
    model = network()
    job = trainer(model, device, metrics=["accuracy", "confusion"])
    history = job.fit(
        (x, y),
        sample_weight=np.ones(len(x), dtype=np.float32),
        validation_data=(x, y),
        batch_size=32,
        epochs=2,
        callbacks=[flatout.EarlyStopping(patience=5)],
        progress=False,
    )
    assert 0 <= history.history["val_accuracy"][-1] <= 1
    assert history.history["val_loss"][-1] == pytest.approx(job.evaluate((x, y))["loss"], rel=1e-3)


@pytest.mark.parametrize("captured", ["off", "on"])
def test_a_keras_model_trains_on_the_device(device, captured):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras runs on another backend")
    x, y = data()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss=loss, metrics=["accuracy"])
    said = []
    job = flatout.Trainer(model, say=said.append, recipe=recipe(device, cuda_graph=captured))
    history = job.fit(x.numpy(), y.numpy(), batch_size=32, epochs=6, verbose=0)
    assert history.history["loss"][-1] < 0.9 * history.history["loss"][0]
    assert model.trainable_variables[0].value.device == device
    right = (job.predict(x.numpy()).argmax(1) == y.numpy()).mean()
    assert history.history["accuracy"][-1] == pytest.approx(right, abs=0.1)
    print(captured, said, history.notes)  # whether its steps can be CUDA graphs
    assert job.predict(x.numpy()).shape == (len(x), CLASSES)


# -- settings --------------------------------------------------------------------------------------

SETTINGS = [
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"precision": "fp16", "fused_optimizer": "on"},
    {"memory_format": "channels_last"},
    {"matmul_precision": "high"},
    {"fused_optimizer": "on"},
    {"rewrites": "on"},
    {"precision": "bf16", "memory_format": "channels_last", "fused_optimizer": "on"},
    {"cudnn_benchmark": "on"},
    {"cuda_graph": "on"},
    {"cuda_graph": "on", "precision": "bf16", "memory_format": "channels_last"},
    {"capture": "on"},
    {"fused_norms": "on"},
    {"fp32_operators": "on", "precision": "bf16"},
]


SWITCHES = (
    "fused_optimizer",
    "rewrites",
    "capture",
    "compile",
    "fused_norms",
    "cuda_graph",
    "cudnn_benchmark",
)


@pytest.mark.parametrize("compute", SETTINGS, ids=str)
def test_a_setting_that_is_asked_for_changes_no_more_than_rounding(device, compute):
    x, y = images()
    ours, theirs, ours_with, theirs_with = pair(convnet, device)
    losses = by_hand(theirs, theirs_with, x, y, device, batch_size=16, epochs=4)
    plain = {
        "precision": "fp32",
        "memory_format": "contiguous",
        "matmul_precision": "highest",
        **dict.fromkeys(SWITCHES, "off"),
    }
    job = trainer(
        ours,
        device,
        optimizer=ours_with,
        allow="tolerant",
        recipe=recipe(device, **{**plain, **compute}),
    )
    history = job.fit((x, y), batch_size=16, epochs=4, progress=False)
    assert history.history["loss"] == pytest.approx(losses, rel=0.1, abs=0.05)
    for name, value in compute.items():
        assert history.recipe.get(f"compute.{name}") == value


class Waits(nn.Module):
    """Waits for the device in its forward."""

    def __init__(self):
        super().__init__()
        self.inner = network(**DROPS)

    def forward(self, x):
        return self.inner(x) * (1.0 if x.sum().item() < 1e9 else 2.0)


class Draws(nn.Module):
    """Draws on the CPU in its forward."""

    def __init__(self):
        super().__init__()
        self.inner = network(**DROPS)

    def forward(self, x):
        return self.inner(x) * float(np.random.rand() < 2)


def graphed(device, make, *, captured="on", fused="off", **options):
    """A fit whose steps are to be CUDA graphs, with dropout; the same without."""
    x, y = data()
    model = make()
    torch.manual_seed(5)
    given = {"optimizer": adam(model), "metrics": ["accuracy"], **options}
    asked = recipe(device, cuda_graph=captured, fused_optimizer=fused)
    job = trainer(model, device, recipe=asked, **given)
    history = job.fit((x, y), batch_size=32, epochs=4, progress=False)
    return model, history, job


@pytest.mark.parametrize("fused", ["off", "on"])
@pytest.mark.parametrize("every", ["step", "epoch", ""])
def test_steps_as_cuda_graphs_are_the_same_bits_with_dropout(device, every, fused):
    """Rates that change in each step, between epochs, or never, where the update is recorded."""

    def cycle(optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)

    def make():
        return network(**DROPS)

    options = {"clip_norm": 0.5 if fused == "on" else None, "fused": fused}
    if every:
        options |= {"scheduler": cycle, "schedule_every": every}
    ours, history, job = graphed(device, make, **options)
    if device.type == "cuda":
        assert not graphs_of(job.loop.stepper).cuda.why
        assert not any("cuda_graph" in note for note in history.notes)
    theirs, plain, _ = graphed(device, make, captured="off", **options)
    check_same(ours, theirs)
    for a, b in zip(history.epochs, plain.epochs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["accuracy"] == b["accuracy"]


@pytest.mark.parametrize(
    ("make", "why"),
    [(Waits, "waits for the GPU"), (Draws, "draws random numbers on the CPU")],
)
def test_what_cannot_be_a_cuda_graph_runs_without_and_is_told(device, make, why):
    ours, history, _ = graphed(device, make)
    theirs, *_ = graphed(device, make, captured="off")
    if device.type == "cuda":
        assert any(why in note for note in history.notes)
    check_same(ours, theirs)


SCALE = 0.5


def test_a_loss_of_ones_own_is_recorded_where_all_that_it_reads_can_be_watched(device):
    scale = [1.0]

    def of_list(output, target):
        return F.cross_entropy(output, target) * scale[0]

    def plain(output, target):
        return F.cross_entropy(output, target) * SCALE

    for loss, why in ((of_list, "reads scale, a list"), (plain, "")):
        job = trainer(network(), device, loss=loss, recipe=recipe(device, cuda_graph="on"))
        history = job.fit(data(), batch_size=32, epochs=2, progress=False)
        if device.type == "cuda":
            assert any(why in note for note in history.notes) if why else not history.notes


def test_a_bad_batch_in_a_cuda_graph_is_named(device):
    x, y = data(320)
    x[300] = float("inf")
    model = network()
    given = {"cuda_graph": "on", "fused_optimizer": "on"}
    job = trainer(model, device, optimizer=adam(model), recipe=recipe(device, **given))
    with pytest.raises(NumbersError, match=r"sample 300\b"):
        job.fit((x, y), batch_size=32, epochs=2, shuffle=False, progress=False)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_layers_that_thaw_are_recorded_again(device):
    def thawed(captured):
        model = network()
        model[0].requires_grad_(False)
        asked = recipe(device, cuda_graph=captured, fused_optimizer="off")
        job = trainer(model, device, optimizer=adam(model), recipe=asked)

        class Thaw(flatout.Callback):
            def on_step(self, state):
                if state.step == 8:
                    model[0].requires_grad_(True)

        job.fit(data(), batch_size=32, epochs=4, callbacks=[Thaw()], progress=False)
        return model

    check_same(thawed("on"), thawed("off"))


def test_fp16_scales_the_loss_and_skips_a_step_that_overflows(device):
    x, y = data(64)
    model = network()
    job = trainer(
        model, device, allow="tolerant", optimizer="sgd", lr=1e-3, loss=huge,
        recipe=recipe(device, precision="fp16"),
    )  # fmt: skip
    job.fit((x, y), batch_size=32, epochs=2, progress=False)
    scaler = job.loop.stepper.scaler
    assert scaler.get_scale() < 65536.0
    assert all(torch.isfinite(p).all() for p in model.parameters())


def huge(output, target):
    """A loss whose scaled gradients do not fit into fp16."""
    return F.cross_entropy(output, target) * 1e4


def test_a_compiled_model_trains(device):
    if device.type != "cuda":
        pytest.skip("takes a C++ compiler")
    x, y = data(128)
    ours, theirs, ours_with, theirs_with = pair(network, device)
    losses = by_hand(theirs, theirs_with, x, y, device)
    job = trainer(
        ours, device, optimizer=ours_with, allow="tolerant",
        recipe=recipe(device, compile="on", precision="fp32", capture="off"),
    )  # fmt: skip
    history = job.fit((x, y), batch_size=32, epochs=2, progress=False)
    assert history.history["loss"] == pytest.approx(losses, rel=1e-3)


def test_a_precision_that_the_script_has_set_the_new_way_is_kept(device):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        x, y = data()
        job = trainer(network(), device)
        job.fit((x, y), batch_size=32, epochs=1, progress=False)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


# -- numbers, random states, checkpoints -----------------------------------------------------------


def test_a_bad_batch_is_named_and_the_weights_are_those_before_it(device):
    x, y = data()
    x[40] = float("inf")
    model = network()
    job = trainer(model, device, optimizer=adam(model), recipe=recipe(device, fused_optimizer="on"))
    with pytest.raises(NumbersError) as caught:
        job.fit((x, y), batch_size=32, epochs=2, progress=False)
    assert re.search(r"sample 40\b", str(caught.value))
    assert all(torch.isfinite(p).all() for p in model.parameters())


class StopAt(flatout.Callback):
    """Ends the fit after a step, in the middle of an epoch, with a checkpoint."""

    def __init__(self, step):
        self.step = step

    def on_step(self, state):
        if state.step == self.step:
            state.stop("the test asks for it")


def fitted(device, folder=None, *, epochs=3, resume=False, callbacks=(), allow="exact"):
    x, y = data()
    model = network(**DROPS)
    torch.manual_seed(3)
    job = flatout.Trainer(
        model,
        optimizer=adam(model),
        allow=allow,
        say=quiet,
        run=folder,
        recipe=Recipe(save=Save(every=3), world=World(device=str(device))),
    )
    options = {"batch_size": 32, "epochs": epochs, "progress": False}
    job.fit((x, y), resume=resume, callbacks=list(callbacks), **options)
    return model, job


def test_a_resume_in_mid_epoch_is_bitwise_with_dropout(device, tmp_path):
    whole, _ = fitted(device, tmp_path / "whole")
    fitted(device, tmp_path / "run", callbacks=[StopAt(7)])
    torch.manual_seed(99)
    torch.rand(5, device=device)
    ours, _ = fitted(device, tmp_path / "run", resume=True, callbacks=[StopAt(7)])
    check_same(ours, whole)


@pytest.mark.parametrize("first", ["device", "cpu"])
def test_a_checkpoint_goes_on_elsewhere(device, tmp_path, first):
    here, there = (device, torch.device("cpu")) if first == "device" else (
        torch.device("cpu"), device
    )  # fmt: skip
    fitted(here, tmp_path / "run", epochs=1)
    model, job = fitted(there, tmp_path / "run", epochs=2, resume=True, allow="redrawn")
    assert next(model.parameters()).device == there
    assert job.history.epochs[-1]["loss"] < 1.2
    saved = tmp_path / "model.safetensors"
    job.save(saved)
    other = network(**DROPS)
    flatout.Trainer(other, say=quiet).load(saved)
    check_same(other, model)


# -- input -----------------------------------------------------------------------------------------


def test_batches_come_to_the_device_ahead_in_order_with_a_ragged_last_one(device):
    x, y = data(70)
    source = flatout.data.as_source((x, y), batch_size=16, seed=3, pin_memory=True)
    plain = list(flatout.data.as_source((x, y), batch_size=16, seed=3).batches(0))
    ahead = list(prefetch(source.batches(0), device))
    assert [batch.size for batch in ahead] == [16, 16, 16, 16, 6]
    for ours, theirs in zip(ahead, plain, strict=True):
        assert ours.inputs.device == device
        assert torch.equal(ours.inputs.cpu(), theirs.inputs)
        assert torch.equal(ours.targets.cpu(), theirs.targets)


@pytest.mark.parametrize("kind", ["arrays", "loader", "pipeline", "on the device"])
def test_every_kind_of_data_gives_the_same_fit(device, kind):
    x, y = data()
    given = {
        "arrays": lambda: (x.numpy(), y.numpy()),
        "loader": lambda: torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=32, pin_memory=device.type == "cuda"
        ),
        "pipeline": lambda: flatout.data.arrays(x, y).batch(32).prefetch(device=str(device)),
        "on the device": lambda: (x.to(device), y.to(device)),
    }[kind]()
    batches = {} if kind in ("loader", "pipeline") else {"batch_size": 32, "shuffle": False}
    ours = network()
    job = trainer(ours, device, optimizer=adam(ours))
    job.fit(given, epochs=2, progress=False, **batches)
    theirs = network().to(device)
    with_ = adam(theirs)
    for _ in range(2):
        for start in range(0, len(x), 32):
            with_.zero_grad()
            at = slice(start, start + 32)
            F.cross_entropy(theirs(x[at].to(device)), y[at].to(device)).backward()
            with_.step()
    check_same(ours, theirs)


def test_arrays_are_gathered_on_the_device_where_they_are_small(device):
    x, y = data()
    ours, theirs = network(), network()
    histories = []
    for model, on_device in ((ours, "auto"), (theirs, "off")):
        asked = Recipe(world=World(device=str(device)), input={"on_device": on_device})
        job = trainer(model, device, optimizer=adam(model), recipe=asked)
        histories.append(job.fit((x, y), batch_size=32, epochs=3, progress=False))
    check_same(ours, theirs)
    if device.type == "cuda":
        assert histories[0].recipe.get("input.on_device") == "on"
        assert histories[1].recipe.get("input.on_device") == "off"


def test_a_step_never_waits_for_the_device(device):
    if device.type != "cuda":
        pytest.skip("nothing waits on a CPU")
    x, y = data(640)
    model = network()
    job = trainer(model, device, recipe=recipe(device, fused_optimizer="on"), metrics=["accuracy"])

    class Strict(flatout.Callback):
        def on_step(self, state):
            if state.step == 5:
                torch.cuda.set_sync_debug_mode("error")
            if state.step == 18:
                torch.cuda.set_sync_debug_mode("default")

    try:
        job.fit((x, y), batch_size=32, epochs=1, callbacks=[Strict()], progress=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- memory ----------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Keeps many numbers of each sample for the backward."""

    def __init__(self, kept=2_000_000):
        super().__init__()
        self.inner, self.kept = nn.Linear(FEATURES, CLASSES), kept

    def forward(self, x):
        outputs = self.inner(x)
        wide = outputs.mean(1, keepdim=True).expand(-1, self.kept).exp()
        return outputs + wide.mean(1, keepdim=True)


def test_a_batch_that_does_not_fit_runs_in_pieces(device):
    if device.type != "cuda":
        pytest.skip("a CPU's memory has no such limit")
    x, y = data(128)
    torch.manual_seed(0)
    model = Wide()
    plain = copy.deepcopy(model).to(device)
    with_ = torch.optim.SGD(plain.parameters(), lr=0.1)
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2**30 / total), device)
    try:  # 64 samples keep 0.5 GB and more in forward, and as much again in backward
        job = trainer(model, device, optimizer="sgd", lr=0.1, allow="tolerant")
        history = job.fit((x, y), batch_size=64, epochs=1, progress=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert any("micro-batches" in note for note in history.notes)
    by_hand(plain, with_, x, y, device, batch_size=64, epochs=1)
    check_close(model, plain, 1e-4)


def test_the_largest_batch_is_found_under_a_limit(device):
    if device.type != "cuda":
        pytest.skip("on a CPU children of the process try it")
    x, y = data(4096)
    torch.manual_seed(0)
    model = Wide()
    before = copy.deepcopy(model)
    said = []
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2**30 / total), device)
    try:
        job = trainer(model, device, optimizer="sgd", lr=0.0, say=said.append)
        job.fit((x[:512], y[:512]), batch_size="auto", epochs=1, progress=False)
        left = torch.cuda.get_per_process_memory_fraction(device)
        assert left == pytest.approx(2**30 / total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert any(re.search(r"batch \d+: the most that fits in .* of memory", line) for line in said)
    check_same(model, before)  # trials leave nothing


# -- what is measured and said ---------------------------------------------------------------------


def test_auto_waits_for_the_device_where_it_measures(device):
    if device.type != "cuda":
        pytest.skip("nothing waits on a CPU")
    big = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    for _ in range(20):
        big = big @ big * 1e-4
    done.record()
    finish_device()
    assert done.query()


def test_auto_tries_settings_of_a_gpu(device, tmp_path):
    """A run that is long enough: what is tried is told, and none of it is a CPU's."""
    x, y = images(320)
    model = convnet()
    job = trainer(model, device, allow="tolerant", optimizer=adam(model))
    job.terms = Terms(
        short_share=1e6, before_share=1e6, fixed_s=1e6, most_pairs=2, compile_s=(1e9, 0.0)
    )
    history = job.fit((x, y), batch_size=16, epochs=40, progress=False)
    known = {*history.tuning["dropped"]}
    for trial in history.tuning["trials"]:
        known |= {*trial["a"], *trial["b"]}
    assert "compute.precision" in known
    assert "compute.memory_format" in known
    if device.type == "cuda":
        assert "memory.allocator" not in known
        assert "process.threads" not in known
        assert "compute.matmul_precision" in known
        assert "compute.cuda_graph" in known
        assert "compute.cudnn_benchmark" in known


def test_the_rates_of_the_device(device, tmp_path):
    rates = machine_rates(device.type)
    assert rates["seconds"] < 20
    flops = rates["flops_per_s"]
    assert flops["fp32/contiguous"]["matmul"]["forward"] > 1e9
    assert rates["bytes_per_s"]["fp32"]["memory"] > 1e8
    assert rates["calls_per_s"] > 1e3
    if device.type == "cuda":
        half = flops["bf16/contiguous"]["matmul"]["forward"]
        assert half > flops["fp32/contiguous"]["matmul"]["forward"]


def test_devices_names_the_gpu(device):
    done = subprocess.run(
        [sys.executable, "-c", "from flatout.cli.main import main; main()", "devices"],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    if device.type == "cuda":
        assert torch.cuda.get_device_name(device) in done.stdout
