"""Several optimizers and losses in one loop: what a plain torch loop gives, bit for bit."""

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from train_jobs import quiet, same, same_state

import flatout
from flatout.data.batches.batch import Batch
from flatout.data.randomness import order
from flatout.errors import CheckpointError, FlatoutError, ModelError, NumbersError
from flatout.recipe import Compute, Memory, Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES, FEATURES, NOISE, BATCH, EPOCHS = 96, 6, 4, 16, 2


class Gan:
    """A generator and a discriminator, an optimizer each, as users write them."""

    def __init__(self):
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, FEATURES))
        self.critic = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)
        )
        self.both = nn.ModuleDict({"generator": self.generator, "critic": self.critic})
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=2e-3)
        self.of_critic = torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9)
        self.data = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))

    def critic_loss(self, real):
        made = self.generator(torch.randn(len(real), NOISE)).detach()
        found, wrong = self.critic(real), self.critic(made)
        return binary_cross_entropy_with_logits(
            found, torch.ones_like(found)
        ) + binary_cross_entropy_with_logits(wrong, torch.zeros_like(wrong))

    def generator_loss(self, real):
        found = self.critic(self.generator(torch.randn(len(real), NOISE)))
        return binary_cross_entropy_with_logits(found, torch.ones_like(found))

    def is_like(self, other):
        return (
            same(self.both, other.both)
            and same_state(self.of_generator, other.of_generator)
            and same_state(self.of_critic, other.of_critic)
        )


def plain_gan(every=1):
    """The generator steps after every so many batches; both losses' means by epoch."""
    gan, means = Gan(), []
    torch.manual_seed(7)
    for epoch in range(EPOCHS):
        at_epoch = torch.from_numpy(order(SAMPLES, 0, epoch))
        losses = {"critic": [], "generator": []}
        for number, start in enumerate(range(0, SAMPLES, BATCH), 1):
            real = gan.data[at_epoch[start : start + BATCH]]
            gan.of_critic.zero_grad()
            loss = gan.critic_loss(real)
            loss.backward()
            gan.of_critic.step()
            losses["critic"].append(loss.item())
            if number % every == 0:
                gan.of_generator.zero_grad()
                loss = gan.generator_loss(real)
                loss.backward()
                gan.of_generator.step()
                losses["generator"].append(loss.item())
        means.append([sum(each) / len(each) for each in losses.values()])
    return gan, means


def fit_gan(gan, run=None, every=1, stop_at=None, resume=False, **options):
    source = flatout.data.as_source(gan.data, batch_size=BATCH, seed=0)
    loop = flatout.Loop(run=run, resume=resume, **{"allow": "exact", "say": quiet, **options})

    def critic_loss(batch):
        return gan.critic_loss(batch.inputs)

    def generator_loss(batch):
        return gan.generator_loss(batch.inputs)

    optimizers = [gan.of_generator, gan.of_critic]
    given = loop.prepare(gan.both, optimizers, compute=critic_loss, data=source, steps=24)
    assert given == (gan.both, optimizers)
    means = []
    for _ in loop.epochs(EPOCHS):
        for batch in loop.batches(source):
            loop.step(critic_loss, batch, gan.of_critic)
            if loop.progress.batch_in_epoch % every == 0:
                loop.step(generator_loss, batch, optimizer=gan.of_generator)
            if (loop.epoch, loop.progress.batch_in_epoch) == stop_at:
                loop.save()
                loop.close()
                return loop, means
        loop.check_numbers()
        means.append([loop.mean_loss(gan.of_critic), loop.mean_loss(gan.of_generator)])
    loop.close()
    return loop, means


@pytest.mark.parametrize("every", [1, 3])
def test_a_gan_is_that_of_a_plain_loop(every):
    plain, wanted = plain_gan(every)
    gan = Gan()
    torch.manual_seed(7)
    loop, means = fit_gan(gan, every=every)
    assert gan.is_like(plain)
    assert means == [pytest.approx(row, rel=1e-6) for row in wanted]
    assert loop.step_count == loop.timeline.steps == EPOCHS * 6 * (1 + 1 / every)


@pytest.mark.parametrize("stop_at", [(0, 4), (1, 3), (1, 6)])
def test_a_gan_is_resumed_bit_for_bit(tmp_path, stop_at):
    plain, wanted = plain_gan()
    gan, begun = Gan(), Gan()
    torch.manual_seed(7)
    fit_gan(begun, run=tmp_path, stop_at=stop_at)
    torch.manual_seed(99)
    _, means = fit_gan(gan, run=tmp_path, resume=True)
    assert gan.is_like(plain)
    assert means[-1] == pytest.approx(wanted[-1], rel=1e-6)


def test_gathered_batches_of_each_optimizer_are_its_own():
    gan, plain = Gan(), Gan()
    torch.manual_seed(7)
    fit_gan(gan, accumulate=2)
    torch.manual_seed(7)
    for epoch in range(EPOCHS):
        halves = plain.data[torch.from_numpy(order(SAMPLES, 0, epoch))].split(BATCH)
        for pair in zip(halves[::2], halves[1::2], strict=True):
            for loss, optimizer in (
                (plain.critic_loss, plain.of_critic),
                (plain.generator_loss, plain.of_generator),
            ):
                optimizer.zero_grad()
                for half in pair:
                    (loss(half) * BATCH / (2 * BATCH)).backward()
                optimizer.step()
    assert gan.is_like(plain)


class Words(nn.Module):
    """A table of which a batch uses few rows, and a dense rest."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 8, sparse=True)
        self.rest = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, words):
        return self.rest(self.table(words).mean(1))[:, 0]

    def optimizers(self):
        return [
            torch.optim.SparseAdam(self.table.parameters(), lr=1e-2),
            torch.optim.Adam(self.rest.parameters(), lr=1e-3),
        ]


def sentences():
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 50, (SAMPLES, 5), generator=draw), torch.randn(SAMPLES, generator=draw)


def fit_words(model, optimizers, run=None, resume=False, stop_at=None, **options):
    source = flatout.data.as_source(sentences(), batch_size=BATCH, seed=0)
    loop = flatout.Loop(run=run, resume=resume, **{"allow": "exact", "say": quiet, **options})

    def compute(batch):
        return mse_loss(model(batch.inputs), batch.targets)

    loop.prepare(model, optimizers, compute=compute, data=source, steps=12)
    for _ in loop.epochs(EPOCHS):
        for batch in loop.batches(source):
            loop.step(compute, batch)
            if loop.step_count == stop_at:
                loop.save()
                loop.close()
                return loop
    loop.close()
    return loop


def plain_words(clip=None):
    model = Words()
    optimizers = model.optimizers()
    x, y = sentences()
    for epoch in range(EPOCHS):
        for at in torch.from_numpy(order(SAMPLES, 0, epoch)).split(BATCH):
            for optimizer in optimizers:
                optimizer.zero_grad()
            mse_loss(model(x[at]), y[at]).backward()
            if clip is not None:
                clip(model)
            for optimizer in optimizers:
                optimizer.step()
    return model, optimizers


@pytest.mark.parametrize("stop_at", [None, 3, 8])
def test_a_sparse_and_a_dense_optimizer_step_together(tmp_path, stop_at):
    model, optimizers = plain_words()
    ours = Words()
    of_ours = ours.optimizers()
    if stop_at:
        begun = Words()
        fit_words(begun, begun.optimizers(), run=tmp_path, stop_at=stop_at)
    loop = fit_words(ours, of_ours, run=tmp_path, resume=bool(stop_at))
    assert same(ours, model)
    assert all(same_state(a, b) for a, b in zip(of_ours, optimizers, strict=True))
    assert loop.step_count == 12


@pytest.mark.parametrize(
    ("fused", "micro_batch"), [("on", "auto"), ("off", 5)], ids=["fused", "in micro-batches"]
)
def test_sparse_and_dense_under_other_settings(fused, micro_batch):
    model, _ = plain_words()
    ours = Words()
    recipe = Recipe(compute=Compute(fused_optimizer=fused), memory=Memory(micro_batch=micro_batch))
    fit_words(ours, ours.optimizers(), allow="tolerant", recipe=recipe)
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("clip", [{"clip_norm": 0.05}, {"clip_value": 0.01}])
def test_sparse_gradients_are_clipped_as_if_they_were_dense(clip):
    def clip_dense(model):
        table = model.table.weight
        table.grad = table.grad.to_dense()
        if "clip_norm" in clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip["clip_norm"])
        else:
            nn.utils.clip_grad_value_(model.parameters(), clip["clip_value"])
        table.grad = table.grad.to_sparse(1)

    model, _ = plain_words(clip_dense)
    ours = Words()
    fit_words(ours, ours.optimizers(), **clip)
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_schedulers_of_several_optimizers_are_resumed(tmp_path):
    def made():
        gan = Gan()
        schedulers = [
            torch.optim.lr_scheduler.StepLR(gan.of_generator, 1, 0.5),
            torch.optim.lr_scheduler.StepLR(gan.of_critic, 2, 0.1),
        ]
        return gan, schedulers

    gan, schedulers = made()
    loop = flatout.Loop(run=tmp_path, say=quiet)
    loop.prepare(gan.both, [gan.of_generator, gan.of_critic], schedulers)
    whole = Batch(gan.data, None, None, None, SAMPLES)
    loop.step(lambda batch: gan.generator_loss(batch.inputs), whole)
    for scheduler in schedulers * 2:
        scheduler.step()
    loop.save()
    loop.close()
    again, others = made()
    loop = flatout.Loop(run=tmp_path, say=quiet, resume=True)
    loop.prepare(again.both, [again.of_generator, again.of_critic], others)
    loop.close()
    assert [o.param_groups[0]["lr"] for o in (again.of_generator, again.of_critic)] == [
        o.param_groups[0]["lr"] for o in (gan.of_generator, gan.of_critic)
    ]
    assert [s.last_epoch for s in others] == [2, 2]


def test_what_cannot_be_is_named(tmp_path):
    gan = Gan()
    loop = flatout.Loop(run=tmp_path, say=quiet, accumulate=3)
    with pytest.raises(ModelError, match="no optimizer"):
        loop.prepare(gan.both, [])
    loop.prepare(gan.both, [gan.of_generator, gan.of_critic])
    source = flatout.data.as_source(gan.data, batch_size=BATCH, seed=0)
    stranger = torch.optim.SGD(gan.critic.parameters(), lr=1.0)
    with pytest.raises(FlatoutError, match="a step of SGD, which is not among the 2 optimizers"):
        loop.step(lambda batch: 0, None, optimizer=stranger)
    for batch in loop.batches(source):
        loop.step(lambda b: gan.critic_loss(b.inputs), batch, gan.of_critic)
        if loop.progress.batch_in_epoch == 3:
            break
        loop.step(lambda b: gan.generator_loss(b.inputs), batch, gan.of_generator)
    with pytest.raises(CheckpointError, match="2 batches that Adam has gathered"):
        loop.save()
    assert loop.flush(lambda b: gan.generator_loss(b.inputs), gan.of_generator)
    loop.save()
    loop.close()


def test_a_bad_step_of_one_optimizer_is_explained_by_its_own_loss():
    gan = Gan()
    source = flatout.data.as_source(gan.data, batch_size=BATCH, seed=0)
    loop = flatout.Loop(say=quiet)
    loop.prepare(gan.both, [gan.of_generator, gan.of_critic])
    before = [p.detach().clone() for p in gan.critic.parameters()]
    batch = next(loop.batches(source))
    loop.step(lambda b: gan.generator_loss(b.inputs), batch, gan.of_generator)
    with pytest.raises(NumbersError, match="step 2"):
        loop.step(lambda b: gan.critic_loss(b.inputs) * torch.nan, batch, gan.of_critic)
    loop.close()
    assert all(torch.equal(a, b) for a, b in zip(before, gan.critic.parameters(), strict=True))


def test_other_optimizers_than_the_checkpoints_are_refused(tmp_path):
    gan = Gan()
    loop = flatout.Loop(run=tmp_path, say=quiet)
    loop.prepare(gan.both, [gan.of_generator, gan.of_critic])
    loop.save()
    loop.close()
    with pytest.raises(CheckpointError, match=r"optimizer is Adam .*, SGD .*, found SGD"):
        flatout.Loop(run=tmp_path, say=quiet, resume=True).prepare(
            gan.both, [gan.of_critic, gan.of_generator]
        )
