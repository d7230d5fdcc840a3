import copy
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flatout.data.batches.batch import Batch
from flatout.errors import OutOfMemory
from flatout.train.compute import ModelCompute
from flatout.train.losses.losses import as_loss
from flatout.train.part import Step
from flatout.train.settings import Switch
from flatout.train.step import Stepper

CPU = torch.device("cpu")
CLASSES = 4


pytestmark = pytest.mark.usefixtures("one_thread")


def network(dtype=torch.float64, *extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *extra, nn.Linear(8, CLASSES)).to(dtype)


def data(size, seed=0, dtype=torch.float64, weight=None):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=draw, dtype=torch.float64).to(dtype)
    y = torch.randint(0, CLASSES, (size,), generator=draw)
    return Batch(x, y, weight, torch.arange(size), size)


def job(model, loss="cross_entropy", optimizer=None, **options):
    """A Stepper and what it differentiates."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    stepper = Stepper(Switch(model, optimizer, CPU), **options)
    return stepper, ModelCompute(model, as_loss(loss), (), unweighted=False)


def moved(model, before):
    """How far each weight went: at rate 1, the gradient that the step used."""
    return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def gradient_of(model, loss):
    return [g.detach() for g in torch.autograd.grad(loss, list(model.parameters()))]


def assert_close(ours, plain, rtol=1e-12, atol=1e-12):
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


# -- the same step in one piece or in many ---------------------------------------------------------


@pytest.mark.parametrize("micro_batch", ["whole", "auto", 1, 3, 100])
def test_one_step_is_that_of_a_plain_loop(micro_batch):
    model, given = network(), data(11)
    stepper, compute = job(model, micro_batch=micro_batch)
    loss = F.cross_entropy(model(given.inputs), given.targets)
    wanted, before = gradient_of(model, loss), weights(model)
    done = stepper(Step(1, [given], compute, stepper.joint))
    assert_close(moved(model, before), wanted)
    torch.testing.assert_close(done.loss, loss.detach(), rtol=1e-12, atol=0)
    assert not done.loss.requires_grad
    assert float(done.weight) == 11
    assert min(done.forward, done.backward, done.optimizer) > 0


def leave_gradients(model):
    """What another loss's backward leaves in the parameters that it went through."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("sizes", [[11], [4, 7]])
@pytest.mark.parametrize("micro_batch", ["whole", "auto", 3])
def test_the_gradients_of_a_step_are_its_own(micro_batch, sizes, precision):
    batches = [data(size, seed, torch.float32) for seed, size in enumerate(sizes)]
    found = []
    for leaves in (False, True):
        model, other = network(torch.float32), network(torch.float32)
        stepper, compute = job(model, micro_batch=micro_batch)
        stepper.use(stepper.switch.now.but(precision=precision))
        if stepper.scaler is not None:
            stepper.scaler.load_state_dict({**stepper.scaler.state_dict(), "scale": 16.0})
        for step in (1, 2):
            if leaves:
                leave_gradients(model)
                leave_gradients(other)
            stepper(Step(step, batches, compute, stepper.joint))
            assert all(p.grad is None for p in model.parameters())
        # Parameters that this optimizer does not train are not the step's to touch.
        assert all((p.grad is not None) == leaves for p in other.parameters())
        found.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_left_in_parameters_that_joined_the_optimizer_later():
    model, joined = network(), network()
    stepper, compute = job(model)
    stepper(Step(1, [data(5)], compute, stepper.joint))
    stepper.switch.optimizers[0].add_param_group({"params": list(joined.parameters())})
    leave_gradients(joined)
    before = weights(joined)
    stepper(Step(2, [data(5)], compute, stepper.joint))
    assert all(torch.equal(a, b) for a, b in zip(weights(joined), before, strict=True))


@given(data=st.data())
@settings(max_examples=40)
def test_pieces_and_accumulation_add_up_to_the_whole_batch(data):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    size = sum(sizes)
    labels = st.lists(st.integers(-1, CLASSES - 1), min_size=size, max_size=size)
    y = torch.tensor([-100 if label < 0 else label for label in data.draw(labels)])
    weight = None
    if data.draw(st.booleans()):
        drawn = st.lists(st.floats(0.1, 3), min_size=size, max_size=size)
        weight = torch.tensor(data.draw(drawn), dtype=torch.float64)
    x = torch.randn(size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = Batch(x, y, weight, None, size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    batches = [
        Batch(x[a : a + n], y[a : a + n], None if weight is None else weight[a : a + n], None, n)
        for a, n in zip(starts, sizes, strict=True)
    ]
    results = []
    for pieces, micro_batch in (
        ([whole], "whole"),
        (batches, "whole"),
        (batches, data.draw(st.integers(1, 5))),
        ([whole], data.draw(st.integers(1, 5))),
    ):
        model = network()
        stepper, compute = job(model, micro_batch=micro_batch)
        before = weights(model)
        done = stepper(Step(1, pieces, compute, stepper.joint))
        results.append([*moved(model, before), done.loss, torch.as_tensor(done.weight).double()])
    for other in results[1:]:
        assert_close(other, results[0])
    assert float(results[0][-2]) >= 0


@pytest.mark.parametrize("form", ["mean", "sum and number", "sum and tensor"])
def test_callables_of_each_form(form):
    def compute_of(model):
        def compute(batch):
            each = F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")
            if form == "mean":
                return each.mean()
            weight = float(batch.size)
            return each.sum(), weight if form == "sum and number" else torch.tensor(weight)

        return compute

    found = []
    for micro_batch in ("whole", 2):
        model = network()
        stepper, _ = job(model, micro_batch=micro_batch)
        before = weights(model)
        stepper(Step(1, [data(7)], compute_of(model), stepper.joint))
        found.append(moved(model, before))
    assert_close(*found)


@pytest.mark.parametrize("micro_batch", ["whole", 2])
@pytest.mark.parametrize("weight", [None, torch.zeros(5, dtype=torch.float64)])
def test_nothing_that_counts_is_no_gradient_and_no_nan(micro_batch, weight):
    model = network()
    y = torch.full((5,), -100) if weight is None else torch.zeros(5, dtype=torch.int64)
    given = data(5)._replace(targets=y, weight=weight)
    stepper, compute = job(model, micro_batch=micro_batch)
    before = weights(model)
    done = stepper(Step(1, [given], compute, stepper.joint))
    assert done.loss == 0
    assert float(done.weight) == 0
    assert not stepper.update.was_bad()
    assert all(not g.any() for g in moved(model, before))


def test_the_gradient_of_ignored_labels_is_torchs_bit_for_bit():
    model, given = network(torch.float32), data(64, dtype=torch.float32)
    given.targets[::3] = -100
    stepper, compute = job(model)
    loss = F.cross_entropy(model(given.inputs), given.targets)
    wanted = gradient_of(model, loss)
    seen = []
    stepper.switch.optimizers[0].register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in model.parameters())
    )
    done = stepper(Step(1, [given], compute, stepper.joint))
    assert torch.equal(done.loss, loss.detach())
    assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))


@pytest.mark.parametrize("micro_batch", ["whole", 3])
@pytest.mark.parametrize("clip", [{"clip_norm": 0.1}, {"clip_value": 0.01}])
def test_the_whole_gradient_is_clipped(micro_batch, clip):
    model, given = network(), data(8)
    stepper, compute = job(model, micro_batch=micro_batch, **clip)
    before = weights(model)
    F.cross_entropy(model(given.inputs), given.targets).backward()
    if "clip_norm" in clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    stepper(Step(1, [given], compute, stepper.joint))
    assert_close(moved(model, before), wanted)


# -- precision -------------------------------------------------------------------------------------


def trained(precision, micro_batch="whole", steps=30, **options):
    model = network(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    stepper, compute = job(model, optimizer=optimizer, micro_batch=micro_batch, **options)
    stepper.use(stepper.switch.now.but(precision=precision))
    given = data(32, dtype=torch.float32)
    losses = [
        float(stepper(Step(step, [given], compute, stepper.joint)).loss) for step in range(steps)
    ]
    return stepper, losses


@pytest.mark.parametrize("micro_batch", ["whole", 5])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_like_float32(precision, micro_batch):
    _, plain = trained("fp32")
    stepper, losses = trained(precision, micro_batch)
    assert (stepper.scaler is not None) == (precision == "fp16")
    assert losses[-1] == pytest.approx(plain[-1], rel=0.05)
    assert losses[-1] < 0.7 * losses[0]


def test_half_precision_is_used_and_left_again():
    seen = []
    model = network(torch.float32)
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    stepper, compute = job(model)
    for precision in ("bf16", "fp32", "fp16", "fp32"):
        stepper.use(stepper.switch.now.but(precision=precision))
        stepper(Step(1, [data(3, dtype=torch.float32)], compute, stepper.joint))
    assert seen == [torch.bfloat16, torch.float32, torch.float16, torch.float32]
    assert stepper.scaler is None


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}])
def test_fp16_skips_a_step_that_overflows_and_lowers_its_scale(clip):
    model, given = network(torch.float32), data(8, dtype=torch.float32)
    stepper, compute = job(model, **clip)
    stepper.use(stepper.switch.now.but(precision="fp16"))
    stepper(Step(1, [given], compute, stepper.joint))
    before, scale = weights(model), stepper.scaler.get_scale()

    def overflowing(batch):
        total, weight = compute(batch)
        return total * 1e4, weight

    stepper(Step(2, [given], overflowing, stepper.joint))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    assert stepper.scaler.get_scale() < scale
    assert all(p.grad is None for p in model.parameters())
    stepper(Step(3, [given], compute, stepper.joint))
    assert not torch.equal(model[0].weight, before[0])


def test_fp16_clips_the_gradient_itself_not_the_scaled_one():
    moves = []
    for precision in ("fp32", "fp16"):
        model = network(torch.float32)
        stepper, compute = job(model, clip_norm=0.05)
        stepper.use(stepper.switch.now.but(precision=precision))
        before = weights(model)
        stepper(Step(1, [data(8, dtype=torch.float32)], compute, stepper.joint))
        moves.append(moved(model, before))
    assert_close(moves[1], moves[0], rtol=0.02, atol=1e-4)


# -- memory ----------------------------------------------------------------------------------------


class Limited(nn.Module):
    """Runs out of memory, as torch does, on more than `most` samples."""

    def __init__(self, most, error=torch.OutOfMemoryError, where="forward"):
        super().__init__()
        self.most, self.error, self.where, self.sizes = most, error, where, []

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.most:
            if self.where == "forward":
                raise self.error("CUDA out of memory. Tried to allocate 2.00 GiB.")
            x.register_hook(self.fail)
        return x

    def fail(self, _gradient):
        raise self.error("CUDA out of memory. Tried to allocate 2.00 GiB.")


def cpu_error(_words):
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 40000000000000 bytes. Error code 12"
    )


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, cpu_error])
def test_a_batch_that_does_not_fit_is_split(error, where):
    limited = Limited(3, error, where)
    model, given = network(torch.float64, limited), data(10)
    loss = F.cross_entropy(network()(given.inputs), given.targets).detach()
    plain, before = network(), weights(model)
    wanted = gradient_of(plain, F.cross_entropy(plain(given.inputs), given.targets))
    stepper, compute = job(model, micro_batch="auto")
    done = stepper(Step(7, [given], compute, stepper.joint))
    assert_close(moved(model, before), wanted)
    torch.testing.assert_close(done.loss, loss, rtol=1e-12, atol=0)
    assert limited.sizes == [10, 5, 3, 3, 2, 2]
    assert stepper.pieces == 4
    assert stepper.notes == [
        "step 7: memory ran out; the batch now runs in 2 micro-batches",
        "step 7: memory ran out; the batch now runs in 4 micro-batches",
    ]
    # What was found out is kept.
    stepper(Step(8, [given], compute, stepper.joint))
    assert limited.sizes[6:] == [3, 3, 2, 2]


def test_accumulated_batches_are_split_as_well():
    limited = Limited(2)
    model, given = network(torch.float64, limited), data(9)
    plain, before = network(), weights(model)
    wanted = gradient_of(plain, F.cross_entropy(plain(given.inputs), given.targets))
    stepper, compute = job(model, micro_batch="auto")
    stepper(Step(1, given.split(2), compute, stepper.joint))
    assert_close(moved(model, before), wanted)
    assert limited.sizes == [5, 3, 2, 1, 1, 1, 1, 1, 1, 1]


def test_fp16_and_splitting():
    limited = Limited(3)
    model = network(torch.float32, limited)
    stepper, compute = job(model, micro_batch="auto")
    stepper.use(stepper.switch.now.but(precision="fp16"))
    before = weights(model)
    stepper(Step(1, [data(8, dtype=torch.float32)], compute, stepper.joint))
    plain, plain_compute = job(twin := network(torch.float32))
    plain(Step(1, [data(8, dtype=torch.float32)], plain_compute, plain.joint))
    assert_close(weights(model), weights(twin), rtol=0.01, atol=1e-3)
    assert not torch.equal(model[0].weight, before[0])


class CountsInABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return x


def test_a_step_that_is_taken_again_leaves_no_trace_of_the_first_try():
    limited = Limited(4)
    model = network(torch.float64, CountsInABuffer(), nn.Dropout(0.5), limited)
    stepper, compute = job(model, micro_batch="auto")
    stepper.pieces = 2
    torch.manual_seed(5)
    stepper(Step(1, [data(10)], compute, stepper.joint))
    assert limited.sizes == [5, 3, 3, 2, 2]
    assert model[2].seen == 10
    twin = network(torch.float64, CountsInABuffer(), nn.Dropout(0.5), Limited(9))
    other, its_compute = job(twin, micro_batch="auto")
    other.pieces = 4
    torch.manual_seed(5)
    other(Step(1, [data(10)], its_compute, other.joint))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(twin), strict=True))


def test_the_first_tries_tensors_are_let_go():
    kept = []

    class Watched(Limited):
        def forward(self, x):
            y = x * 1
            kept.append(weakref.ref(y))
            try:
                return super().forward(y)
            except RuntimeError as error:
                met = [error]  # noqa: F841 - a cycle, as in code that looks at errors on their way
                raise

    model = network(torch.float64, Watched(4))
    stepper, compute = job(model, micro_batch="auto")
    at_retry = []

    class Looks(nn.Module):
        def forward(self, x):
            at_retry.append([ref() is None for ref in kept])
            return x

    model.insert(0, Looks())
    stepper(Step(1, [data(8)], compute, stepper.joint))
    assert at_retry[1] == [True]


def test_batch_norm_forbids_splitting():
    model = network(torch.float64, nn.BatchNorm1d(8).double(), Limited(4))
    stepper, compute = job(model, micro_batch="auto")
    with pytest.raises(OutOfMemory, match="BatchNorm forbids splitting") as caught:
        stepper(Step(3, [data(10)], compute, stepper.joint))
    assert caught.value.where == "step 3, batch of 10 in 1 micro-batch"
    assert "Memory(micro_batch=5)" in caught.value.do
    assert "batch_size" in caught.value.do
    assert all(p.grad is None for p in model.parameters())
    # What the message proposes works.
    stepper, compute = job(model, micro_batch=4)
    stepper(Step(3, [data(10)], compute, stepper.joint))


def test_a_single_sample_that_does_not_fit():
    model = network(torch.float64, Limited(0))
    stepper, compute = job(model, micro_batch="auto")
    before = weights(model)
    with pytest.raises(OutOfMemory, match="a single sample") as caught:
        stepper(Step(2, [data(3)], compute, stepper.joint))
    assert "activation_checkpointing" in caught.value.do
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


@pytest.mark.parametrize("micro_batch", ["whole", 5])
def test_what_was_asked_for_is_not_changed_unasked(micro_batch):
    model = network(torch.float64, Limited(4))
    stepper, compute = job(model, micro_batch=micro_batch)
    with pytest.raises(OutOfMemory, match="memory ran out") as caught:
        stepper(Step(2, [data(10)], compute, stepper.joint))
    assert "Memory(micro_batch='auto')" in caught.value.do
    assert f"micro_batch={micro_batch!r}" in caught.value.where


@pytest.mark.parametrize("micro_batch", ["auto", "whole"])
def test_memory_that_runs_out_in_the_optimizer_is_no_reason_to_step_again(micro_batch):
    class Greedy(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model, limited = network(torch.float64, limit := Limited(99)), limit
    stepper, compute = job(
        model, optimizer=Greedy(model.parameters(), lr=1.0), micro_batch=micro_batch
    )
    with pytest.raises(torch.OutOfMemoryError):
        stepper(Step(1, [data(4)], compute, stepper.joint))
    assert limited.sizes == [4]
    # And it is not held against the next step.
    stepper.update.parts[0].optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    limited.most = 2
    if micro_batch == "auto":
        stepper(Step(2, [data(4)], compute, stepper.joint))
        assert limited.sizes == [4, 4, 2, 2]


@pytest.mark.parametrize("micro_batch", ["auto", "whole", 2])
def test_other_errors_come_through_as_they_are(micro_batch):
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("something else")

    model = network(torch.float64, Broken())
    stepper, compute = job(model, micro_batch=micro_batch)
    with pytest.raises(RuntimeError, match=r"^something else$") as caught:
        stepper(Step(1, [data(4)], compute, stepper.joint))
    assert caught.traceback[-1].name == "forward"


@pytest.mark.slow
def test_memory_that_really_runs_out_on_a_cpu():
    """Under a limit on the address space a real allocation fails, and the step still succeeds."""
    script = """
        import resource, torch
        from torch import nn
        from flatout.data.batches.batch import Batch
        from flatout.train.compute import ModelCompute
        from flatout.train.losses.losses import as_loss
        from flatout.train.settings import Switch
        from flatout.train.part import Step
        from flatout.train.step import Stepper

        torch.set_num_threads(1)

        def run(micro_batch, limit):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(),
                                  nn.Linear(2048, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            switch = Switch(model, optimizer, torch.device("cpu"))
            stepper = Stepper(switch, micro_batch=micro_batch)
            compute = ModelCompute(model, as_loss("cross_entropy"), (), unweighted=True)
            size = 20_000
            x = torch.randn(size, 64, generator=torch.Generator().manual_seed(1))
            batch = Batch(x, torch.arange(size) % 4, None, None, size)
            small = Batch(x[:8], batch.targets[:8], None, None, 8)
            stepper(Step(0, [small], compute, stepper.joint))  # allocates what is allocated once
            if limit:
                with open("/proc/self/statm") as file:
                    now = int(file.read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (now + limit, -1))
            stepper(Step(1, [batch], compute, stepper.joint))
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            return stepper, [p.detach() for p in model.parameters()]

        free, wanted = run("whole", None)
        limited, found = run("auto", 400_000_000)
        assert limited.pieces > 1, limited.pieces
        for a, b in zip(found, wanted):
            torch.testing.assert_close(a, b)
        print(limited.notes)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "memory ran out; the batch now runs in 2 micro-batches" in done.stdout


# -- around a step ---------------------------------------------------------------------------------


def test_a_bad_step_is_held_back_and_known():
    model, given = network(), data(4)
    stepper, compute = job(model)
    before = weights(model)
    given.inputs[2, 3] = float("nan")
    stepper(Step(1, [given], compute, stepper.joint))
    assert stepper.update.was_bad()
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


def test_a_model_and_its_copy_step_alike_under_every_setting():
    """Switching back and forth leaves nothing behind that changes a step."""
    model = network(torch.float32)
    twin = copy.deepcopy(model)
    stepper, compute = job(model)
    start = stepper.switch.now
    for change in ({"precision": "bf16"}, {"fused_optimizer": "on"}, {"precision": "fp16"}, {}):
        stepper.use(start.but(**change))
    plain, its_compute = job(twin)
    for step in range(3):
        for each, function in ((stepper, compute), (plain, its_compute)):
            each(Step(step, [data(5, step, torch.float32)], function, each.joint))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(twin), strict=True))


def test_one_input_channel_gets_the_strides_of_the_format_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3))
    switch = Switch(model, torch.optim.Adam(model.parameters()), torch.device("cpu"))
    stepper = Stepper(switch)
    plain = stepper.switch.now
    contiguous = [p.stride() for p in model.parameters()]
    stepper.use(plain.but(memory_format="channels_last"))
    assert model[0].weight.stride() == (9, 1, 3, 1)
    # So the convolution answers in the same format, though its input lies alike in both.
    output = model[0](torch.randn(2, 1, 8, 8))
    assert output.is_contiguous(memory_format=torch.channels_last)
    stepper.use(plain)
    assert [p.stride() for p in model.parameters()] == contiguous
