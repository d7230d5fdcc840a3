"""Stages in odd combinations: each row is itself, whatever stands around it."""

import functools
import operator
import threading

import numpy as np
import pytest
import torch

import flatout
from flatout.data.digests.digests import NoDigest, function_name
from flatout.errors import DataError

X = np.arange(40, dtype=np.float32)


def rows(count=40):
    return flatout.data.arrays(X[:count, None], X[:count])


def pairs(pipeline, epoch=0):
    """What each row is, by its number."""
    found = []
    for batch in pipeline.batches(epoch):
        values = batch.inputs.reshape(batch.size, -1)[:, 0].tolist()
        found += zip(batch.indices.tolist(), values, strict=True)
    return found


def same(x, y):
    return x, y


# -- what samples look like is learned from a row that takes part ----------------------------------


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize(
    "chosen",
    [
        lambda data: data.filter(lambda x, y: x[0] >= 10),
        lambda data: data.split(0.5, by="order")[1],
        lambda data: data.shard(1, 2, by="rows"),
    ],
)
def test_a_cache_of_some_rows_keeps_those(chosen, where, tmp_path):
    data = chosen(rows().map(same)).cache(where, folder=str(tmp_path)).map(same).batch(8)
    for epoch in range(2):
        assert all(number == value for number, value in pairs(data, epoch))


def test_a_cache_of_a_mixture_of_parts():
    first = rows().map(same).split(0.1, by="order")[0].cache("memory")
    data = flatout.data.mix(first, rows()).cache("memory").batch(4)
    for epoch in range(2):
        assert sorted(value for _, value in pairs(data, epoch)) == sorted([*X, *X[:4]])


def test_a_function_sees_no_row_that_was_left_out():
    def root(x, y):
        assert x[0] >= 5
        return x, y

    data = rows().filter(lambda x, y: x[0] >= 5).map(root).batch(4)
    assert len(pairs(data)) == 35


# -- a cache on the disk is found by what is in it ------------------------------------------------


def times(x, y, factor):
    return factor * x, y


class Times:
    def __init__(self, factor):
        self.factor = factor

    def method(self, x, y):
        return self.factor * x, y

    def __call__(self, x, y):
        return self.factor * x, y


def closed_over(values):
    return lambda x, y: (x + values[1000], y)


def by_keyword(factor):
    def function(x, y, *, factor=factor):
        return factor * x, y

    return function


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (functools.partial(times, factor=2), functools.partial(times, factor=3)),
        (Times(2).method, Times(3).method),
        (Times(2), Times(3)),
        (by_keyword(2), by_keyword(3)),
        (closed_over(torch.zeros(2000)), closed_over(torch.arange(2000.0))),
        (lambda x, y: (torch.sin(x), y), lambda x, y: (torch.cos(x), y)),
    ],
)
def test_other_functions_have_other_caches(one, other, tmp_path):
    for function in (one, other):
        made = rows().map(function).cache("disk", folder=str(tmp_path)).batch(8)
        kept = torch.cat([batch.inputs for batch in made.batches(0)])
        wanted = [function(x, None)[0] for x in torch.tensor(X[:, None])]
        assert torch.equal(kept, torch.stack(wanted))
    assert function_name(one) == function_name(one) != function_name(other)


def test_functions_without_code_have_names():
    assert function_name(torch.sin) != function_name(torch.cos)
    assert function_name(operator.itemgetter(0)) != function_name(operator.itemgetter(1))
    with pytest.raises(NoDigest):
        function_name(Times(threading.Lock()))


def test_other_data_have_other_caches(tmp_path):
    many = np.zeros((10_000, 1), np.float32)
    for change in (0.0, 1.0):
        many[5003] = change
        data = flatout.data.arrays(many).map(twice).cache("disk", folder=str(tmp_path)).batch(500)
        assert sum(float(batch.inputs.sum()) for batch in data.batches(0)) == 2 * change


def twice(x):
    return 2 * x


def test_a_dataset_without_a_name_shares_no_cache(tmp_path):
    for factor in (1, 2):
        dataset = torch.utils.data.TensorDataset(torch.tensor(X) * factor)
        data = flatout.data.torch_dataset(dataset).cache("disk", folder=str(tmp_path)).batch(8)
        kept = torch.cat([batch.inputs for batch in data.batches(0)])
        assert torch.equal(kept.reshape(-1), torch.tensor(X) * factor)


# -- functions that draw from the global generators ----------------------------------------------


def noisy(x, y):
    return x + torch.rand(1), y


@pytest.mark.parametrize(
    "drawing",
    [
        lambda: rows().map(noisy).cache("memory").batch(8),
        lambda: flatout.data.mix(rows().map(noisy), rows().map(noisy)).batch(8),
        lambda: rows().batch(8).map(lambda x, y: (x + torch.rand(len(x), 1), y)),
    ],
)
def test_what_draws_is_the_same_in_every_run(drawing):
    found = []
    for threads in (1, 3):
        torch.rand(threads)  # the state of the process does not matter
        data = drawing().options(threads=threads)
        found.append([pairs(data, 0), pairs(data, 1)])
    assert found[0] == found[1]


def drawn(x, y, rng):
    return x + rng.random(), y


_own = np.random.default_rng(0)


def by_own_generator(x, y):
    return x + _own.random(), y


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(X[index]) + torch.rand(1), index


def shown(data, capsys):
    data.explain()
    return capsys.readouterr().out


def twice_of_two(x, y):
    return 2 * x, y


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("function", [noisy, drawn, by_own_generator])
def test_a_cache_behind_a_random_function_does_not_freeze_it(function, where, tmp_path, capsys):
    folder = str(tmp_path)
    data = rows().map(twice_of_two).map(function).cache(where, folder=folder).shuffle(1).batch(8)
    first, second = (dict(pairs(data, epoch)) for epoch in (0, 1))
    assert all(0 <= first[n] - 2 * X[n] < 1 for n in range(40))
    assert sum(first[n] == second[n] for n in range(40)) < 3
    said = shown(data, capsys)
    assert f"cache before map {function.__name__}: map {function.__name__} is random" in said
    assert said.index("map twice_of_two") < said.index("CACHE")


@pytest.mark.parametrize("threads", [1, 3])
def test_draws_behind_a_cache_are_those_without_one(threads):
    plain, kept = (
        data.shuffle(1).batch(8).options(threads=threads)
        for data in (
            rows().map(twice_of_two).map(drawn),
            rows().map(twice_of_two).map(drawn).cache(),
        )
    )
    for epoch in (0, 1):
        assert pairs(plain, epoch) == pairs(kept, epoch)


def test_a_random_source_has_no_cache(capsys):
    noise = flatout.data.mix(rows().map(drawn), rows().map(twice_of_two))
    for data in (flatout.data.torch_dataset(Noisy()), noise):
        kept = data.cache().batch(8)
        assert pairs(kept, 0) != pairs(kept, 1)
        assert "cache was left out" in shown(kept, capsys)


# -- batches are their owner's ---------------------------------------------------------------------


@pytest.mark.parametrize("long_way", [False, True])
def test_writing_into_a_batch_changes_no_other(long_way):
    data = rows().map(same).batch(8) if long_way else rows().batch(8)
    for batch in data.batches(0):
        batch.indices.fill_(0)
    assert [number for number, _ in pairs(data, 1)] == list(range(40))


def test_sources_of_different_dtypes_do_not_mix():
    other = flatout.data.arrays(X[:, None].astype(np.float64), X)
    with pytest.raises(DataError, match=r"float32 of shape .* float64 of shape"):
        flatout.data.mix(rows(), other).batch(4).peek(1)


# -- vectors of different lengths -----------------------------------------------------------------


def upto(x):
    return torch.arange(int(x) % 4 + 1)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_vectors_of_different_lengths_are_kept(where, tmp_path):
    data = flatout.data.arrays(X).map(upto).cache(where, folder=str(tmp_path)).shuffle(1).batch(2)
    for epoch in range(2):
        for batch in data.batches(epoch):
            for number, row in zip(batch.indices.tolist(), batch.inputs.tolist(), strict=True):
                assert row[: number % 4 + 1] == list(range(number % 4 + 1))


def test_vectors_that_differ_late_are_refused_by_a_cache():
    many = flatout.data.arrays(np.arange(200)).map(lambda x: torch.zeros(3 + (int(x) == 150)))
    with pytest.raises(DataError, match="differ in length, and the first 64 did not"):
        list(many.cache("memory").batch(10).batches(0))


def test_vectors_of_different_lengths_may_be_mixed():
    data = flatout.data.mix(
        flatout.data.arrays(X).map(upto), flatout.data.arrays(X).map(lambda x: torch.arange(3))
    )
    assert sum(batch.size for batch in data.batch(4).batches(0)) == 80


# -- ranks with fewer rows than steps --------------------------------------------------------------


def test_a_rank_without_a_row_for_a_batch_gets_one_that_weighs_nothing():
    for rank in range(8):
        data = flatout.data.arrays(X[:10], X[:10]).shard(rank, 8, by="rows").batch(2)
        batches = list(data.map(lambda x, y: (x + 1, y)).batches(0))
        assert len(batches) == 5
        assert all(batch.size for batch in batches)
        weights = [1.0 if b.weight is None else float(b.weight.sum()) for b in batches]
        assert sum(weights) == 10 * (rank + 1) // 8 - 10 * rank // 8


STAGES = {
    "none": lambda data: data.batch(2),
    "window": lambda data: data.shuffle(1, window=4).batch(2),
    "cache": lambda data: data.map(same).cache("memory").shuffle(1).batch(2),
    "disk": lambda data: data.map(same).cache("disk").batch(2),
    "repeat": lambda data: data.repeat(2).batch(2),
    "filter": lambda data: data.filter(lambda x, y: True).batch(2),
    "mixup": lambda data: data.batch(2).mixup(0.2, classes=2).map(same),
}


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_a_rank_without_any_row_makes_as_many_batches_as_the_others(stages):
    made = []
    for rank in range(8):
        whole = flatout.data.arrays(X[:3, None], X[:3].astype(np.int64) % 2)
        data = stages(whole.shard(rank, 8, by="rows"))
        batches = list(data.batches(0))
        assert len(batches) == data.steps
        assert data.targets().shape == (data.samples,)
        weight = sum(b.size if b.weight is None else float(b.weight.sum()) for b in batches)
        made.append((data.steps, weight))
    assert len({steps for steps, _ in made}) == 1
    assert sum(weight > 0 for _, weight in made) == 3


@pytest.mark.parametrize("options", [{"by": "rows"}, {"presharded": True}])
def test_a_filter_that_leaves_no_rank_a_row_is_an_error_on_all(options):
    data = flatout.data.arrays(X[:8]).shard(1, 2, **options).filter(lambda x: False).batch(2)
    with pytest.raises(DataError, match="no sample is left for any rank"):
        data.agreed(lambda own: [own, own])


FORMATS = {
    "svm": (b"1 1:2\n0 3:1\n", b"", lambda path: flatout.data.libsvm(path)),
    "csv": (b"u,y\n1,0\n2,1\n", b"u,y\n", lambda path: flatout.data.csv(path, target="y")),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_rank_whose_only_file_is_empty_gets_batches_that_weigh_nothing(tmp_path, kind):
    full, empty, read = FORMATS[kind]
    (tmp_path / f"a.{kind}").write_bytes(full)
    (tmp_path / f"b.{kind}").write_bytes(empty)
    data = read(str(tmp_path / f"*.{kind}")).batch(1)
    own, other = (data.shard(rank, 2, by="files") for rank in range(2))
    assert [batch.weight for batch in own.batches(0)] == [None, None]
    assert [batch.weight.tolist() for batch in other.batches(0)] == [[0.0], [0.0]]
    assert [batch.samples for batch in other.batches(0)] == [0, 0]


def test_a_short_batch_that_is_filled_up_counts_each_row_once():
    total = 0.0
    for rank in range(4):
        data = flatout.data.arrays(X[:21], X[:21]).batch(5, last="pad").shard(rank, 4)
        sizes = []
        for batch in data.batches(0):
            sizes.append(batch.size)
            total += batch.size if batch.weight is None else float(batch.weight.sum())
        assert len(set(sizes)) == 1
    assert total == 21


# -- refusals -----------------------------------------------------------------


def test_what_cannot_be_done_is_said():
    with pytest.raises(DataError, match=r"options\(processes=1\)"):
        rows().map(lambda x, y: (x, y)).options(processes=1).batch(4).peek(1)
    with pytest.raises(DataError, match="bfloat16"):
        flatout.data.arrays(torch.zeros(9, dtype=torch.bfloat16)).batch(2, last="pad").peek(1)
    with pytest.raises(DataError, match="put shard after mix"):
        flatout.data.mix(rows().shard(0, 2), rows().shard(0, 2)).batch(2).peek(1)
    with pytest.raises(DataError, match="comes after mix"):
        flatout.data.mix(rows(), rows()).shuffle(1, window=4).batch(2).peek(1)


def fails_in_itself(x, y, weight):
    return len(3)


@pytest.mark.parametrize("behind", [False, True])
def test_a_function_that_takes_other_parts_than_samples_have_is_refused(behind):
    rows = flatout.data.arrays(X[:, None], X, np.ones(40, "float32"))

    def first(function):
        mapped = rows.batch(4).map(function) if behind else rows.map(function).batch(4)
        return next(iter(mapped.batches(0)))

    with pytest.raises(DataError, match=r"takes \(x, y\), and the samples have") as caught:
        first(same)
    assert "def f(inputs, targets, weight)" in caught.value.do
    assert first(lambda inputs, targets, weight: (inputs, targets, weight)).weight is not None
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        first(fails_in_itself)
