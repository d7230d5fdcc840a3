"""mixup and cutmix: blends of neighbors in a batch, the same on any number of ranks."""

import pytest
import torch
from data_made_up import same

import flatout
from flatout.data.batches.normalization import Normalization
from flatout.errors import DataError

CLASSES = 4


def plain(rows=50, x=None, seed=1):
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(rows, 3, 6, 8, generator=draw) if x is None else x
    return flatout.data.arrays(x, torch.arange(len(x)) % CLASSES).shuffle(seed=seed)


def mixup(pipeline, alpha=0.4):
    return pipeline.mixup(alpha, classes=CLASSES)


def cutmix(pipeline, alpha=1.0):
    return pipeline.cutmix(alpha, classes=CLASSES)


def both(pipeline):
    return cutmix(mixup(pipeline))


def joined(parts):
    """What ranks have of a batch, without what only fills it up."""
    real = [part.without_padding() for part in parts if part.samples]
    return [torch.cat([getattr(one, name) for one in real]) for name in ("inputs", "targets")]


def test_mixup_adds_up_neighbors_by_one_share_for_a_batch():
    pipeline = plain().batch(12)
    shares = []
    for epoch in range(4):
        for batch, made in zip(
            pipeline.batches(epoch), mixup(pipeline).batches(epoch), strict=True
        ):
            assert torch.equal(made.indices, batch.indices)
            assert made.size == batch.size
            hot = torch.nn.functional.one_hot(batch.targets, CLASSES).float()
            x, y = batch.inputs, batch.inputs.roll(1, 0)
            share = float(((made.inputs - y) * (x - y)).sum() / ((x - y) ** 2).sum())
            shares.append(share)
            assert torch.allclose(made.inputs, share * x + (1 - share) * y, atol=1e-5)
            want = share * hot + (1 - share) * hot.roll(1, 0)
            assert torch.allclose(made.targets, want, atol=1e-5)
            assert made.targets.dtype == torch.float32
    assert len({round(share, 4) for share in shares}) == len(shares)
    assert min(shares) < 0.3
    assert max(shares) > 0.7


def test_cutmix_takes_one_rectangle_and_targets_have_its_area():
    pipeline, areas = plain().batch(12), []
    for batch, made in zip(pipeline.batches(0), cutmix(pipeline).batches(0), strict=True):
        other = batch.inputs.roll(1, 0)
        taken = (made.inputs == other).all(1) & (batch.inputs != other).any(1)
        kept = (made.inputs == batch.inputs).all(1)
        assert (taken ^ kept).all()
        assert (taken == taken[:1]).all()  # the same for all
        rows, columns = taken[0].any(1).sum(), taken[0].any(0).sum()
        assert taken[0].sum() == rows * columns
        areas.append(float(taken[0].float().mean()))
        hot = torch.nn.functional.one_hot(batch.targets, CLASSES).float()
        want = (1 - areas[-1]) * hot + areas[-1] * hot.roll(1, 0)
        assert torch.allclose(made.targets, want, atol=1e-6)
    assert len(set(areas)) > 1
    last = plain(12, torch.rand(12, 6, 8, 3)).batch(12)  # channels last
    batch, made = next(last.batches(0)), next(cutmix(last).batches(0))
    taken = (made.inputs != batch.inputs).any(3)
    assert (taken == taken[:1]).all()
    assert torch.equal(made.inputs[taken], batch.inputs.roll(1, 0)[taken])


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
def test_any_number_of_ranks_makes_the_same_batches(ranks, last):
    pipeline = both(plain().augment(flip="both").batch(12, last=last))
    whole = list(pipeline.batches(1))
    parts = zip(*(pipeline.shard(rank, ranks).batches(1) for rank in range(ranks)), strict=True)
    for batch, part in zip(whole, parts, strict=True):
        part = part[:1] if batch.size < ranks and last == "keep" else part
        for one, other in zip(joined([batch]), joined(part), strict=True):
            assert torch.equal(one, other)
        numbers = torch.cat([one.indices[: one.samples] for one in part])
        assert torch.equal(numbers, batch.indices[: batch.samples])


def test_draws_depend_on_seed_epoch_and_batch_alone():
    pipeline = both(plain().batch(12))
    whole = list(pipeline.batches(2))
    assert all(map(same, pipeline.options(threads=3).batches(2), whole))
    assert all(map(same, pipeline.batches(2, 2), whole[2:]))
    assert not any(map(same, pipeline.batches(3), whole))
    other = both(plain(seed=2).batch(12))
    assert not any(map(same, other.batches(2), whole))


def test_bytes_stay_bytes_and_are_normalized_behind():
    x = torch.randint(0, 256, (24, 3, 4, 4), dtype=torch.uint8)
    pipeline = plain(x=x).batch(24)
    bytes_mixed = next(iter(mixup(pipeline).batches(0)))
    floats = next(iter(mixup(plain(x=x.float()).batch(24)).batches(0)))
    assert bytes_mixed.inputs.dtype == torch.uint8
    assert (bytes_mixed.inputs.float() - floats.inputs).abs().max() <= 0.501
    normal = next(iter(mixup(pipeline).normalize(0.5, 0.25).batches(0)))
    want = Normalization.of(0.5, 0.25).batch(bytes_mixed)
    assert torch.equal(normal.inputs, want.inputs)


def test_functions_of_batches_get_what_is_blended_and_samples_have_no_numbers():
    pipeline = mixup(plain().batch(12)).map(lambda x, y: (x, y.sum(1)))
    sums = torch.cat([batch.targets for batch in pipeline.batches(0)])
    assert sums.shape == (50,)
    assert torch.allclose(sums, torch.ones(50))
    assert pipeline.numbered() == "mixup makes others of whole batches"
    explanation = both(plain().batch(12)).explanation()
    assert explanation.runs[-3:] == ["batch", "mixup", "cutmix"]
    assert "cutmix changes learning" in str(explanation)
    assert mixup(plain().batch(5)).stage_words != mixup(plain().batch(5), 0.3).stage_words


def test_a_trainer_learns_from_shares_and_validates_on_classes():
    draw = torch.Generator().manual_seed(3)
    y = torch.arange(96) % CLASSES
    x = torch.nn.functional.one_hot(y, CLASSES).float() + 0.1 * torch.rand(96, 4, generator=draw)
    data = flatout.data.arrays(x, y)
    trainer = flatout.Trainer(
        torch.nn.Linear(4, CLASSES),
        loss="cross_entropy",
        optimizer=lambda p: torch.optim.SGD(p, 1.0),
        metrics=["accuracy", "confusion"],
    )
    train = data.shuffle(seed=1).batch(16).mixup(0.2, classes=CLASSES)
    trainer.fit(train, validation_data=data.batch(16), epochs=6)
    assert trainer.evaluate(data.batch(16))["accuracy"] == 1.0


def test_misuse_says_what_to_do(tmp_path):
    batched = plain().batch(12)
    for call, words in [
        (lambda: plain().mixup(0.2), r"write .batch\(size\) before .mixup\(0.2\)"),
        (lambda: batched.map(lambda x, y: (x, y)).cutmix(), "put map after cutmix"),
        (lambda: batched.mixup(0), "alpha as a number above 0, found 0"),
        (lambda: batched.mixup(0.2, classes=1), "classes: expected an int of at least 2"),
        (lambda: batched.mixup(0.2).mixup(0.2), "stands twice"),
        (lambda: batched.mixup(0.2).steps, r"pass it: mixup\(0.2, classes=10\)"),
        (lambda: list(batched.mixup(0.2, classes=3).batches(0)), r"class 3 is not in 0..2"),
        (lambda: plain(x=torch.rand(9, 4)).batch(3).cutmix(classes=4).steps, "expected images"),
        (
            lambda: plain(x=torch.ones(9, 4).long()).batch(3).mixup(1, classes=4).steps,
            r"floats or bytes, found int64 of shape \(1, 4\)",
        ),
        (
            lambda: flatout.data.arrays(torch.rand(9, 4)).batch(3).mixup(1).steps,
            "one tensor of targets, found none",
        ),
        (lambda: flatout.data.convert(mixup(batched), tmp_path / "a.rows"), "convert writes rows"),
    ]:
        with pytest.raises(DataError, match=words):
            call()
