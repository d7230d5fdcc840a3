"""balance: each class equally often in an epoch."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset

import flatout
from flatout.data.execution.samples import told_targets
from flatout.data.mixture import mix
from flatout.data.stages.balance import balanced
from flatout.errors import DataError

COUNTS = (70, 21, 9)


def skewed(counts=COUNTS):
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return flatout.data.arrays(torch.arange(len(y)).float()[:, None], y)


def rows(pipeline, epoch=0):
    return torch.cat([batch.inputs[:, 0].long() for batch in pipeline.batches(epoch)]).numpy()


def classes(pipeline, epoch=0):
    return torch.cat([batch.targets for batch in pipeline.batches(epoch)]).numpy()


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(1, 30),
    st.integers(0, 2**64),
    st.integers(1, 6),
)
def test_every_class_and_within_it_every_row_comes_equally_often(sizes, each, seed, epochs):
    starts = np.cumsum([0, *sizes])
    groups = [np.arange(a, b) for a, b in pairwise(starts)]
    order = balanced(groups, each, seed)
    total = np.zeros(starts[-1], np.int64)
    for epoch in range(epochs):
        found = order(epoch)
        assert np.array_equal(found, order(epoch))
        seen = np.bincount(found, minlength=starts[-1])
        for group in groups:
            assert seen[group].sum() == each
            assert np.ptp(seen[group]) <= 1
        # Every stretch as long as there are classes has one row of each.
        owner = np.searchsorted(starts, found, side="right") - 1
        assert (np.sort(owner.reshape(each, -1), axis=1) == np.arange(len(sizes))).all()
        total += seen
    # Over all epochs too: no row is left out for ever.
    assert all(np.ptp(total[group]) <= 1 for group in groups)


@pytest.mark.parametrize(("how", "each"), [("over", 70), ("under", 9), (30, 30)])
def test_an_epoch_has_as_many_of_each_class(how, each):
    pipeline = skewed().balance(how, seed=3).shuffle(seed=1).batch(16)
    assert pipeline.samples == 3 * each
    assert pipeline.steps == -(-3 * each // 16)
    for epoch in range(3):
        assert np.bincount(classes(pipeline, epoch)).tolist() == [each] * 3
    assert not np.array_equal(rows(pipeline, 0), rows(pipeline, 1))
    assert f"3 classes x {each} rows an epoch" in str(pipeline.explanation())


def test_what_is_left_out_has_its_turn_in_later_epochs():
    pipeline = skewed().balance("under").batch(9)
    seen = [set(rows(pipeline, epoch).tolist()) for epoch in range(8)]
    assert len(seen[0] & seen[1]) == 9  # those of the rarest class
    assert set.union(*seen) == set(range(100))


def test_it_goes_by_what_a_function_makes_of_the_targets():
    pipeline = skewed().map(lambda x, y: (x, (y > 0).long())).balance().batch(20)
    assert np.bincount(classes(pipeline)).tolist() == [70, 70]
    assert pipeline.steps == 7
    assert "class 1 30 x 2.33" in str(pipeline.explanation())


def test_only_the_rows_that_were_chosen():
    train, rest = skewed().split(0.5, stratify=True)
    balanced_ones = train.balance("over").batch(16)
    own = set(rows(train.batch(50)).tolist())
    assert set(rows(balanced_ones).tolist()) == own
    assert np.bincount(classes(balanced_ones)).tolist() == [35] * 3
    # The others stay as they are.
    assert np.bincount(classes(rest.batch(50))).tolist() == [35, 11, 5]


def test_a_resume_and_ranks_make_the_same_batches():
    whole = skewed().balance("over", seed=5).shuffle(seed=2).batch(24)
    batches = [batch.inputs for batch in whole.batches(3)]
    later = [batch.inputs for batch in whole.batches(3, 4)]
    assert all(map(torch.equal, batches[4:], later))
    parts = [[b.inputs for b in whole.shard(rank, 2).batches(3)] for rank in range(2)]
    joined = [torch.cat(pair) for pair in zip(*parts, strict=True)]
    assert all(map(torch.equal, batches, joined))


def noisy(x, y, rng):
    return x + rng.random(dtype=np.float32), y


def test_each_time_that_a_row_comes_it_is_redrawn():
    x = torch.arange(100.0).reshape(100, 1, 1, 1).repeat(1, 3, 2, 2) * torch.arange(1.0, 3)
    base = flatout.data.arrays(x, (torch.arange(100) >= 90).long())
    for changed in (
        base.augment(flip="horizontal"),
        base.augment(crop=2, padding=3, views=3),
        base.map(noisy),
        flatout.data.mix(base.augment(flip="horizontal"), base.augment(flip="both")),
    ):
        if not changed.stages:
            pipeline = changed.repeat(9).batch(24)
        else:
            pipeline = changed.balance("over").shuffle(seed=2).batch(24)
        batches = list(pipeline.batches(1))
        numbers = torch.cat([batch.indices for batch in batches])
        given = torch.cat([batch.inputs for batch in batches])
        plainly = list(changed.shuffle(seed=2).batch(24).batches(1))
        alone = dict(
            zip(
                torch.cat([batch.indices for batch in plainly]).tolist(),
                torch.cat([batch.inputs for batch in plainly]),
                strict=True,
            )
        )
        kinds = []
        for number in range(95, 100):
            own = given[numbers == number]
            assert len(own) == 9
            kinds.append(len(own.unique(dim=0)))
            # The first time it is drawn as where it comes once.
            if changed.stages:
                assert torch.equal(own[0], alone[number])
        assert max(kinds) > 1
        parts = [list(pipeline.shard(rank, 2).batches(1)) for rank in range(2)]
        joined = [torch.cat([a.inputs, b.inputs]) for a, b in zip(*parts, strict=True)]
        assert torch.equal(torch.cat(joined), given)
        assert torch.equal(torch.cat([b.inputs for b in pipeline.batches(1, 3)]), given[72:])


def test_behind_a_cache_and_in_passes():
    plain = skewed().map(lambda x, y: (x * 1, y)).balance("over").repeat(2).batch(32)
    kept = skewed().map(lambda x, y: (x * 1, y)).cache("memory").balance("over").repeat(2).batch(32)
    assert plain.samples == 2 * 210
    for epoch in range(2):
        assert np.array_equal(rows(plain, epoch), rows(kept, epoch))
    assert np.array_equal(rows(plain)[:210], rows(skewed().balance("over").batch(32), 0))
    assert np.array_equal(rows(plain)[210:], rows(skewed().balance("over").batch(32), 1))


def test_balanced_sources_can_be_mixed():
    mixed = mix(skewed((8, 2)).balance("over"), skewed((3, 6)).balance("under")).batch(11)
    assert np.bincount(classes(mixed)).tolist() == [11, 11]
    with pytest.raises(DataError, match="balance comes after mix"):
        mix(skewed(), skewed()).balance().batch(4).steps  # noqa: B018


class Told(Dataset):
    def __init__(self):
        self.targets = [0, 0, 0, 1]
        self.read = 0

    def __len__(self):
        return 4

    def __getitem__(self, number):
        self.read += 1
        return torch.full((2,), float(number)), self.targets[number]


def test_a_dataset_that_tells_its_targets_is_not_read_for_them():
    dataset = Told()
    assert told_targets(Subset(dataset, [3, 1])).tolist() == [1, 0]
    pipeline = flatout.data.torch_dataset(dataset).balance().batch(6)
    assert pipeline.samples == 6
    assert dataset.read <= 1  # a look at what samples are
    dataset.target_transform = str
    assert told_targets(dataset) is None


def test_names_of_classes_are_told(tmp_path):
    from PIL import Image

    for name, count in {"cat": 3, "dog": 1}.items():
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (8, 8), (number * 50, 0, 0)).save(tmp_path / name / f"{number}.png")
    pipeline = flatout.data.images(tmp_path, size=8).balance("over").batch(2)
    assert "balance: 2 classes x 3 rows an epoch: cat 3 x 1, dog 1 x 3" in pipeline.notes()


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (lambda p: p.balance("more"), "'over', 'under' or a number of rows, found 'more'"),
        (lambda p: p.balance(0), "an int of at least 1, found 0"),
        (lambda p: p.balance().balance(), "balance stands twice"),
        (lambda p: p.balance().split(0.5), "balance comes before split"),
        (lambda p: p.balance().filter(lambda x, y: True), "balance comes before filter"),
        (lambda p: p.balance().shard(0, 2, by="rows"), "shard gives each rank its own"),
        (
            lambda p: p.map(lambda x, y: (x, x[0] / 7)).balance().batch(2).steps,
            "balance needs classes; found 100 different targets in 100",
        ),
        (
            lambda p: p.map(lambda x, y: x).balance().batch(2).steps,
            "one target a sample; found none",
        ),
        (
            lambda p: flatout.data.Pipeline(Come()).balance().batch(2).batches(0),
            "balance wants rows that can be found by number",
        ),
    ],
)
def test_what_cannot_be_balanced(written, words):
    with pytest.raises(DataError, match=words):
        written(skewed())


class Come:
    rows = None

    def blocks(self, epoch, buffers):
        yield from ()
