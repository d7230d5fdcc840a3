"""Loop: the pieces for a loop of one's own give what the Trainer gives."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from train_jobs import (
    CLASSES,
    data,
    network,
    plain_fit,
    quiet,
    same,
    same_state,
    saving,
    trainer,
)

import flatout
from flatout.errors import CheckpointError, DataError, FlatoutError, NumbersError
from flatout.recipe import Compute, Recipe
from flatout.save.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")


class Job:
    """A loop as a user writes it."""

    def __init__(self, seed: int = 0, *, batch_size: int = 32, model=None, source=None, **options):
        self.model = network(seed) if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=15)
        self.source = source or flatout.data.as_source(data(), batch_size=batch_size, seed=0)
        self.loop = flatout.Loop(**{"allow": "exact", "say": quiet, **options})
        self.losses = []

    def compute(self, batch):
        return F.cross_entropy(self.model(batch.inputs), batch.targets)

    def prepare(self):
        return self.loop.prepare(
            self.model,
            self.optimizer,
            self.scheduler,
            compute=self.compute,
            data=self.source,
            steps=15,
        )

    def run(self, epochs=3, stop_at=None):
        loop = self.loop
        self.prepare()
        for _ in loop.epochs(epochs):
            for batch in loop.batches(self.source):
                if loop.step(self.compute, batch):
                    self.scheduler.step()
                if loop.step_count == stop_at:
                    loop.save({"losses": self.losses})
                    loop.close()
                    return self
            if loop.flush(self.compute):
                self.scheduler.step()
            loop.check_numbers(self.compute)
            self.losses.append(loop.mean_loss())
        loop.close()
        return self


def test_it_is_the_plain_loop_bit_for_bit():
    x, y = data()
    theirs = network()
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(plain, T_max=15)
    torch.manual_seed(7)
    losses = plain_fit(
        theirs, plain, x, y, epochs=3, scheduler=scheduler, clip_norm=0.5, clip_value=0.1
    )
    job = Job(clip_norm=0.5, clip_value=0.1)
    torch.manual_seed(7)
    job.run()
    assert same(job.model, theirs)
    assert same_state(job.optimizer, plain)
    assert job.losses == pytest.approx(losses, rel=1e-6)
    assert job.loop.timeline.steps == job.loop.step_count == 15
    assert (job.loop.epoch, job.loop.progress.step_in_epoch) == (3, 0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_the_trainer_bit_for_bit(accumulate):
    job = Job(accumulate=accumulate)
    torch.manual_seed(7)
    job.run()
    model = network()
    other = trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=15),
        accumulate=accumulate,
    )
    torch.manual_seed(7)
    history = other.fit(data(), batch_size=32, epochs=3, progress=False)
    assert same(model, job.model)
    assert history.history["loss"] == job.losses


def test_prepare_gives_back_the_users_own_objects():
    job = Job()
    model, optimizer = job.prepare()
    assert model is job.model
    assert optimizer is job.optimizer
    job.loop.close()


def test_without_compute_and_data_open_settings_stay_plain():
    job = Job()
    job.loop.prepare(job.model, job.optimizer)
    assert job.loop.resolved.compute.precision == "fp32"
    assert all(choice.ratio is None for choice in job.loop.resolved.choices.values())
    for batch in job.loop.batches(job.source):
        job.loop.step(job.compute, batch)
    assert job.loop.step_count == 5
    job.loop.close()


@pytest.mark.parametrize("stop_at", [3, 5, 7])
def test_a_resume_goes_on_bit_for_bit(tmp_path, stop_at):
    """In the middle of an epoch, after its last step, and in the second one."""
    torch.manual_seed(7)
    whole = Job().run()
    torch.manual_seed(7)
    run = tmp_path / "run"
    half = Job(run=run).run(stop_at=stop_at)
    torch.manual_seed(99)
    said = []
    rest = Job(seed=5, run=run, resume=True, say=said.append)
    rest.losses = half.losses
    rest.run()
    assert same(rest.model, whole.model)
    assert same_state(rest.optimizer, whole.optimizer)
    assert rest.losses == whole.losses
    assert rest.loop.restored_extra == {"losses": half.losses[: stop_at // 6]}
    assert said == [
        f"resumed step {stop_at} from step-00000000{stop_at}, 0 samples repeated, 0 skipped"
    ]


def test_batches_that_are_skipped_do_not_come_back(tmp_path):
    job = Job(run=tmp_path / "run")
    job.prepare()
    seen = []
    for number, batch in enumerate(job.loop.batches(job.source)):
        if number in (0, 2):
            continue
        seen.append(batch.indices[0].item())
        job.loop.step(job.compute, batch)
        if number == 3:
            break
    job.loop.save()
    job.loop.close()
    rest = Job(run=tmp_path / "run", resume=True)
    rest.prepare()
    left = [batch.indices for batch in rest.loop.batches(rest.source)]
    assert len(left) == 1
    assert torch.equal(left[0], list(job.source.batches(0))[4].indices)
    rest.loop.close()


def test_gathered_batches_make_a_step_together():
    job = Job(accumulate=2)
    job.prepare()
    done = [job.loop.step(job.compute, batch) for batch in job.loop.batches(job.source)]
    assert done == [False, True, False, True, False]
    assert job.loop.flush(job.compute)
    assert not job.loop.flush(job.compute)
    assert job.loop.step_count == 3
    job.loop.close()
    with pytest.raises(FlatoutError, match="accumulate must be at least 1, found 0"):
        flatout.Loop(accumulate=0)


def test_steps_on_batches_of_ones_own_are_timed_too():
    x, y = data()
    loop = flatout.Loop(say=quiet)
    model = network()
    loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for at in range(0, 150, 50):
        batch = flatout.data.Batch(x[at : at + 50], y[at : at + 50], None, None, 50)
        loop.step(lambda b: F.cross_entropy(model(b.inputs), b.targets), batch)
    loop.close()
    assert loop.timeline.steps == 3
    assert sum(loop.timeline.lanes().values()) < 10_000  # not since the clock's beginning
    assert loop.timeline.lanes()["input"] == 0


def test_a_bad_number_is_named_and_the_weights_are_kept():
    x, y = data()
    x[[17, 40]] = float("inf")
    source = flatout.data.as_source((x, y), batch_size=50, shuffle=False)
    job = Job(source=source, model=network(dropout=0, norm=False))
    before = {k: v.clone() for k, v in job.model.state_dict().items()}
    with pytest.raises(NumbersError) as caught:
        job.run(1)
    assert "step 1, learning rate 0.01" in str(caught.value)
    assert re.search(r"input.*samples 17, 40$", str(caught.value), re.MULTILINE)
    assert "the weights are those before this step" in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in job.model.state_dict().items())
    assert job.loop.step_count == 0


def test_of_gathered_batches_the_bad_one_is_named():
    x, y = data()
    x[70] = float("nan")
    source = flatout.data.as_source((x, y), batch_size=10, shuffle=False)
    job = Job(source=source, model=network(dropout=0, norm=False), accumulate=5)
    with pytest.raises(NumbersError, match=r"step 2,(.|\n)*input.*sample 70\n"):
        job.run(1)
    assert job.loop.step_count == 1


def test_settings_are_taken_back_by_close():
    job = Job(recipe=Recipe(compute=Compute(deterministic=True)))
    job.prepare()
    assert torch.are_deterministic_algorithms_enabled()
    job.loop.close()
    job.loop.close()
    assert not torch.are_deterministic_algorithms_enabled()


def test_autocast_and_ready_are_for_an_evaluation_of_ones_own():
    job = Job(recipe=Recipe(compute=Compute(precision="bf16")))
    job.prepare()
    batch = job.loop.ready(next(job.source.batches(0)))
    with job.loop.autocast(), torch.no_grad():
        output = job.model(batch.inputs)
    assert output.dtype == torch.bfloat16
    assert output.shape == (32, CLASSES)
    job.loop.close()


def test_a_checkpoint_knows_its_path(tmp_path):
    run = tmp_path / "run"
    job = Job(run=f"{run}/", recipe=saving(keep_last=9, asynchronous=False))
    job.prepare()
    loop = job.loop
    assert not loop.is_saved
    expected = loop.next_checkpoint()
    assert loop.save() == expected == f"{run}/checkpoints/step-000000000"
    assert loop.is_saved
    loop.step(job.compute, next(loop.batches(job.source)))
    assert not loop.is_saved
    first = loop.save(score=2.0)
    again = loop.next_checkpoint()
    assert loop.save(score=1.0) == again == f"{first}.1"
    assert Checkpoints(run / "checkpoints").load().score == 1.0
    loop.close()


def test_saving_without_a_run_folder_is_an_error():
    job = Job()
    job.prepare()
    with pytest.raises(CheckpointError, match="there is no run folder"):
        job.loop.save()
    job.loop.close()
    with pytest.raises(CheckpointError, match="there is no run folder"):
        Job(resume=True).prepare()


def test_data_are_compared_where_they_are_first_seen(tmp_path):
    run = tmp_path / "run"
    Job(run=run).run(stop_at=3)
    x, y = data()
    for source, words in (
        (flatout.data.as_source((x + 1, y), batch_size=32), "differ from those of the checkpoint"),
        (flatout.data.as_source((x, y), batch_size=16), "batches of 32, 5 an epoch"),
    ):
        job = Job(run=run, resume=True)
        job.loop.prepare(job.model, job.optimizer, job.scheduler)
        with pytest.raises(DataError, match=words):
            next(job.loop.batches(source))
        job.loop.close()


# -- on a GPU ------------------------------------------------------------------------------------

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class TestOnAGpu:
    pytestmark = on_gpu

    def test_a_step_never_waits_for_the_device(self):
        job = Job(recipe=Recipe(compute=Compute(fused_optimizer="on")))
        job.prepare()
        try:
            for _ in job.loop.epochs(3):
                for batch in job.loop.batches(job.source):
                    job.loop.step(job.compute, batch)
                    if job.loop.step_count == 5:  # kernels are loaded, state is made
                        torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        job.loop.check_numbers(job.compute)
        job.loop.close()
        assert job.loop.step_count == 15

    def test_a_bad_number_is_found_late_and_named_as_if_at_once(self):
        x, y = data()
        x[[17, 40]] = float("inf")
        source = flatout.data.as_source((x, y), batch_size=50, seed=3)
        model = network(dropout=0, norm=False)
        job = Job(source=source, model=model, recipe=Recipe(compute=Compute(fused_optimizer="on")))
        with pytest.raises(NumbersError) as caught:
            job.run(2)
        step, rate = re.search(r"step (\d+), learning rate (\S+)", str(caught.value)).groups()
        # The schedule's rate at that step, though it was found some steps later.
        expected = 0.01 * (1 + math.cos(math.pi * (int(step) - 1) / 15)) / 2
        assert float(rate) == pytest.approx(expected)
        assert re.search(r"sample(s 17, 40| 17| 40|s 40, 17)$", str(caught.value), re.MULTILINE)
        assert "the weights are those before this step" in str(caught.value)
        assert all(torch.isfinite(p).all() for p in model.parameters())

    def test_the_optimizers_state_follows_its_parameters(self):
        x, y = data()
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        job = Job(model=model)
        job.optimizer, job.scheduler = optimizer, None
        job.prepare()
        for batch in job.loop.batches(job.source):
            assert batch.inputs.is_cuda
            job.loop.step(job.compute, batch)
        job.loop.close()
        assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())

    @pytest.mark.parametrize("stop_at", [3, 7])
    def test_a_resume_is_bitwise_with_deterministic_operators(self, tmp_path, stop_at):
        recipe = Recipe(compute=Compute(deterministic=True))
        torch.manual_seed(7)
        whole = Job(recipe=recipe).run()
        torch.manual_seed(7)
        half = Job(recipe=recipe, run=tmp_path / "run").run(stop_at=stop_at)
        torch.manual_seed(99)
        rest = Job(seed=5, recipe=recipe, run=tmp_path / "run", resume=True)
        rest.losses = half.losses
        rest.run()
        assert same(rest.model, whole.model)
        assert rest.losses == whole.losses


def test_a_compute_with_other_parameters_is_told_what_it_gets():
    model = torch.nn.Linear(2, 1)
    data = flatout.data.as_source((torch.ones(4, 2),), batch_size=2)
    loop = flatout.Loop(say=quiet)
    with pytest.raises(
        DataError, match=r"(?s)missing 1 required.*calls its compute function with the batch only"
    ):
        loop.prepare(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            compute=lambda model, batch: model(batch.inputs).mean(),
            data=data,
        )


def test_a_loss_may_take_gradients_itself():
    """As a gradient penalty does."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def trained(loop):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters())

        def penalty(inputs):
            near = inputs.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(near).sum(), near, create_graph=True)
            return (slope.norm(dim=1) - 1).square().mean()

        if loop is None:
            for _ in range(3):
                optimizer.zero_grad()
                penalty(x).backward()
                optimizer.step()
            return model.state_dict()
        source = flatout.data.as_source((x, torch.zeros(64)), batch_size=64, shuffle=False)
        compute = lambda batch: penalty(batch.inputs)  # noqa: E731
        loop.prepare(model, optimizer, compute=compute, data=source, steps=3)
        for _ in loop.epochs(3):
            for batch in loop.batches(source):
                loop.step(compute, batch)
        loop.close()
        return model.state_dict()

    plain, ours = trained(None), trained(flatout.Loop(allow="exact", say=lambda line: None))
    assert all(torch.equal(value, ours[name]) for name, value in plain.items())


def test_a_model_that_is_left_in_evaluation_mode_is_reported_once():
    said = []
    job = Job(say=said.append)
    job.prepare()
    for epoch in job.loop.epochs(3):
        for batch in job.loop.batches(job.source):
            job.loop.step(job.compute, batch)
        if epoch == 0:
            job.model.eval()
    job.loop.close()
    steps = job.loop.step_count // 3
    words = f"the model is in evaluation mode from step {steps + 1} on: a function called"
    assert [line.startswith(words) for line in said if "evaluation mode" in line] == [True]


def test_a_loss_that_leaves_a_trainers_model_in_evaluation_mode_is_reported():
    model = network(0)

    def loss(output, target):
        model.eval()
        return F.cross_entropy(output, target)

    history = flatout.Trainer(model, loss=loss, allow="exact", say=quiet).fit(data(), verbose=0)
    assert sum("evaluation mode from step" in note for note in history.notes) == 1
