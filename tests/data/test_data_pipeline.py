import numpy as np
import pytest
import torch
from data_made_up import COLUMNS, MadeUp, same
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout
from flatout.data.mixture import mix
from flatout.data.pipeline import Pipeline
from flatout.errors import DataError


def numbers(pipeline, epoch=0, start=0):
    """The rows of each batch that weigh something."""
    return [
        [
            number
            for at, number in enumerate(batch.indices.tolist())
            if batch.weight is None or batch.weight[at]
        ]
        for batch in pipeline.batches(epoch, start)
    ]


def flat(lists):
    return [value for one in lists for value in one]


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), st.integers(0, 2), st.data())
def test_order_does_not_depend_on_threads_or_the_start(rows, size, threads, epoch, data):
    pipeline = Pipeline(MadeUp(rows)).shuffle(seed=5).batch(size).options(threads=threads)
    whole = list(pipeline.batches(epoch))
    assert sorted(flat(batch.indices.tolist() for batch in whole)) == list(range(rows))
    start = data.draw(st.integers(0, pipeline.steps))
    assert all(map(same, pipeline.batches(epoch, start), whole[start:]))
    assert len(whole) == pipeline.steps


def test_order_is_that_of_arrays():
    made = Pipeline(MadeUp(50)).shuffle(seed=3).batch(8)
    arrays = flatout.data.arrays(torch.arange(50)).shuffle(seed=3).batch(8)
    assert numbers(made, 2) == numbers(arrays, 2)
    assert numbers(made, 1) != numbers(made, 2)


def test_arrays_take_the_direct_way_and_the_long_way_alike():
    x, y = torch.arange(80, dtype=torch.uint8).reshape(20, 4), torch.arange(20)
    data = flatout.data.arrays(x, {"y": y}, torch.ones(20), scale=0.5, shift=1.0)
    direct = data.shuffle(seed=1).batch(6)
    mapped = data.shuffle(seed=1).map(lambda x, y, w: (x, y, w)).batch(6)
    assert all(map(same, direct.batches(0), mapped.batches(0)))
    plain = data.batch(6)
    assert numbers(plain) == [list(range(i, min(20, i + 6))) for i in range(0, 20, 6)]


def test_functions_of_samples_and_of_batches():
    seen = []

    def one(inputs, target):
        seen.append(inputs["x"].shape)
        return inputs["x"] + 1, target

    def many(x, y):
        seen.append(x.shape)
        return x * 2, y

    pipeline = Pipeline(MadeUp(20)).map(one).batch(8).map(many).options(threads=1)
    first = next(iter(pipeline.batches(0)))
    assert first.inputs[:, 0].tolist() == [2 * (n + 1) for n in range(8)]
    assert set(seen) == {(3,), (8, 3)}
    assert first.indices.tolist() == list(range(8))


def test_ragged_columns_come_to_functions_without_padding():
    pipeline = Pipeline(MadeUp(8)).map(lambda x, y: (x["ids"] * 1, y)).batch(8)
    (batch,) = pipeline.batches(0)
    assert batch.inputs.shape == (8, 3)
    assert batch.inputs[3].tolist() == [3, 3, 3]
    assert batch.inputs[4].tolist() == [0, 0, 0]


def test_what_a_function_draws_depends_on_the_sample_alone():
    def noisy(inputs, target, rng):
        return inputs["x"] + torch.from_numpy(rng.random(3)), target

    def many(x, y, rng):
        return x + rng.random(), y

    one = Pipeline(MadeUp(40)).shuffle(seed=2).map(noisy).batch(8).map(many)
    found = [list(one.options(threads=n).batches(1)) for n in (1, 3)]
    assert all(map(same, *found))
    assert not same(found[0][0], next(iter(one.batches(0))))
    assert all(map(same, one.batches(1, 2), found[0][2:]))


def test_functions_that_draw_from_the_global_generators_are_seeded():
    def noisy(inputs, target):
        return inputs["x"] + torch.rand(3) + np.random.rand(), target

    pipeline = Pipeline(MadeUp(40)).shuffle(seed=2).map(noisy).batch(8)
    whole = list(pipeline.batches(1))
    assert all(map(same, pipeline.batches(1, 3), whole[3:]))
    torch.manual_seed(5)
    before = torch.rand(4)
    torch.manual_seed(5)
    iterator = pipeline.batches(0)
    next(iterator)
    assert torch.equal(torch.rand(4), before)
    assert pipeline._program.in_this_thread


def test_filter_is_counted_and_shuffled():
    pipeline = Pipeline(MadeUp(40)).filter(lambda x, y: y == 3).shuffle(seed=1).batch(4)
    assert pipeline.samples == 8
    assert pipeline.steps == 2
    assert sorted(flat(numbers(pipeline))) == list(range(3, 40, 5))
    with pytest.raises(DataError, match="leaves none of 40 samples"):
        list(Pipeline(MadeUp(40)).filter(lambda x, y: False).batch(4).batches(0))
    with pytest.raises(DataError, match="put filter before batch"):
        Pipeline(MadeUp(40)).batch(4).filter(lambda x, y: True)


@pytest.mark.parametrize("late", [True, False])
def test_split_parts_share_no_sample(late):
    made = Pipeline(MadeUp(100))
    if late:
        parts = made.shuffle(seed=1).batch(8).split(0.9, seed=4)
    else:
        parts = [p.shuffle(seed=1).batch(8) for p in made.split(0.9, seed=4)]
    found = [flat(numbers(part)) for part in parts]
    assert [len(one) for one in found] == [90, 10]
    assert sorted(flat(found)) == list(range(100))
    assert numbers(parts[0]) != numbers(made.split(0.9, seed=5)[0].shuffle(seed=1).batch(8))


def test_split_by_order_and_by_class():
    made = Pipeline(MadeUp(100, classes=4))
    train, test = made.split(0.95, by="order")
    assert flat(numbers(train.batch(10))) == list(range(95))
    assert flat(numbers(test.batch(10))) == list(range(95, 100))
    train, test = made.split(0.8, seed=1, stratify=True)
    counts = torch.bincount(torch.cat([b.targets for b in test.batch(7).batches(0)]))
    assert counts.tolist() == [5, 5, 5, 5]
    with pytest.raises(DataError, match="between 0 and 1"):
        made.split(1.0)
    with pytest.raises(DataError, match="cannot go by order"):
        made.split(0.5, by="order", stratify=True)


@settings(max_examples=20)
@given(
    st.integers(4, 80), st.integers(1, 12), st.integers(1, 4), st.sampled_from(["batch", "rows"])
)
def test_shards_lose_and_repeat_nothing(rows, size, world, by):
    made = Pipeline(MadeUp(rows)).shuffle(seed=1).batch(size)
    shards = [made.shard(rank, world, by=by) for rank in range(world)]
    assert {shard.steps for shard in shards} == {made.steps}
    found = [numbers(shard) for shard in shards]
    assert {len(one) for one in found} == {made.steps}
    if by == "rows":
        assert sorted(flat(flat(one) for one in found)) == list(range(rows))
        return
    for step, whole in enumerate(numbers(made)):
        parts = [one[step] for one in found]
        assert flat(parts) == whole or (len(whole) < world and parts == [whole] * world)


def test_a_resume_on_another_world_goes_on_in_the_same_order():
    made = Pipeline(MadeUp(64)).shuffle(seed=1).batch(8)
    two = [made.shard(rank, 2) for rank in range(2)]
    before = [flat(step) for step in zip(*(numbers(p)[:3] for p in two), strict=True)]
    four = [made.shard(rank, 4) for rank in range(4)]
    after = [flat(step) for step in zip(*(numbers(p, 0, 3) for p in four), strict=True)]
    assert before + after == numbers(made)


def test_presharded_data_make_the_steps_that_were_agreed_on():
    made = Pipeline(MadeUp(50)).batch(16).shard(0, 2, presharded=True, steps=7)
    assert len(numbers(made)) == 7
    assert sorted(flat(numbers(made))) == list(range(50))
    open_ended = Pipeline(MadeUp(50)).batch(16).shard(0, 2, presharded=True)
    with pytest.raises(DataError, match="pass steps="):
        list(open_ended)
    assert open_ended.agreed(lambda own: [own, 70]).steps == 8  # 120 samples in batches of 16
    with pytest.raises(DataError, match="steps= is for presharded"):
        Pipeline(MadeUp(50)).shard(0, 2, steps=7)
    with pytest.raises(DataError, match="both rank and world_size"):
        Pipeline(MadeUp(50)).shard(0)
    with pytest.raises(DataError, match="expected a rank from 0 to 1, found 2"):
        Pipeline(MadeUp(50)).shard(2, 2)


def test_the_ranks_of_a_node_share_its_files(monkeypatch):
    names = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**names, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    made = Pipeline(MadeUp(50)).batch(16).shard(presharded=True, steps=4)
    assert flat(numbers(made)) == list(range(25, 50))
    assert flat(numbers(Pipeline(MadeUp(50)).batch(16).shard(by="rows"))) == list(range(37, 50))


def test_the_ragged_end():
    made = Pipeline(MadeUp(10))
    assert [len(n) for n in numbers(made.batch(4))] == [4, 4, 2]
    assert [len(n) for n in numbers(made.batch(4, last="drop"))] == [4, 4]
    last = list(made.batch(4, last="pad").batches(0))[-1]
    assert last.size == 4
    assert last.weight.tolist() == [1, 1, 0, 0]
    assert last.indices.tolist() == [8, 9, 8, 9]


def test_repeat_makes_one_epoch_of_several_passes():
    made = Pipeline(MadeUp(10)).shuffle(seed=1).repeat(2).batch(4)
    assert [len(n) for n in numbers(made)] == [4] * 5
    assert sorted(flat(numbers(made))) == sorted([*range(10)] * 2)
    assert made.steps == 5


@pytest.mark.parametrize(("last", "sizes"), [("keep", [4, 4, 2]), ("drop", [4, 4])])
def test_batches_that_are_repeated_keep_the_borders_of_passes(last, sizes):
    once = Pipeline(MadeUp(10)).shuffle(seed=1).batch(4, last=last)
    made = once.repeat(2)
    assert [len(n) for n in numbers(made)] == sizes * 2
    assert numbers(made) == numbers(once, 0) + numbers(once, 1)
    assert numbers(made, 1) == numbers(once, 2) + numbers(once, 3)
    assert numbers(made, 0, 3) == numbers(made)[3:]
    assert (made.steps, made.samples) == (2 * len(sizes), 2 * sum(sizes))
    assert made.explanation().runs[-2:] == ["batch", "repeat"]
    two = [numbers(made.shard(rank, 2)) for rank in range(2)]
    assert [flat(parts) for parts in zip(*two, strict=True)] == numbers(made)


def test_repeated_batches_of_arrays_and_with_padding_and_by_length():
    arrays = flatout.data.arrays(torch.arange(10))
    assert [len(n) for n in numbers(arrays.batch(4).repeat(2))] == [4, 4, 2] * 2
    assert [len(n) for n in numbers(arrays.repeat(2).batch(4))] == [4] * 5
    padded = list(Pipeline(MadeUp(10)).batch(4, last="pad").repeat(2).batches(0))
    assert [batch.size for batch in padded] == [4] * 6
    assert padded[2].weight.tolist() == padded[5].weight.tolist() == [1, 1, 0, 0]
    grouped = Pipeline(MadeUp(50)).shuffle(seed=1).batch(8, by_length=3)
    assert numbers(grouped.repeat(2)) == numbers(grouped, 0) + numbers(grouped, 1)


def test_ranks_with_own_rows_keep_the_borders_of_passes():
    made = Pipeline(MadeUp(21)).batch(8).repeat(2)
    ranks = [numbers(made.shard(rank, 2, by="rows")) for rank in range(2)]
    assert {len(one) for one in ranks} == {6}
    for turn in (slice(0, 3), slice(3, 6)):
        assert sorted(flat(flat(one[turn]) for one in ranks)) == list(range(21))
    agreed = made.shard(0, 2, presharded=True).agreed(lambda own: [own, 20])
    assert agreed.steps == 2 * 4  # 21 + 10 samples by 8 in each pass
    with pytest.raises(DataError, match="a multiple of 2 as steps"):
        made.shard(0, 2, presharded=True, steps=7)


def test_by_length_saves_padding():
    made = Pipeline(MadeUp(400)).shuffle(seed=1)
    grouped, plain = made.batch(8, by_length=10), made.batch(8)
    assert sorted(flat(numbers(grouped))) == list(range(400))
    assert grouped.explanation().padding < 0.1 < plain.explanation().padding
    assert numbers(grouped, 1) == numbers(grouped.options(threads=3), 1)
    with pytest.raises(DataError, match="wants ragged rows"):
        list(flatout.data.arrays(torch.ones(4)).batch(2, by_length=True).batches(0))


def test_mixing():
    a, b = Pipeline(MadeUp(60)), Pipeline(MadeUp(20, name="b"))
    both = mix(a.shuffle(seed=1), b.shuffle(seed=2), seed=3).batch(8)
    assert sorted(flat(numbers(both))) == list(range(80))
    shares = mix(a.shuffle(seed=1), b.shuffle(seed=2), weights=(1, 1)).batch(8)
    for epoch in range(3):
        found = flat(numbers(shares, epoch))
        assert sum(n < 60 for n in found) == sum(n >= 60 for n in found) == 20
    for batch in shares.batches(0):
        ours = batch.indices >= 60
        assert torch.equal(batch.inputs["x"][:, 0].long(), batch.indices - 60 * ours)
    x = Pipeline(MadeUp(10, columns=COLUMNS[:1]))
    with pytest.raises(DataError, match="different columns"):
        list(mix(a, x).batch(4).batches(0))
    with pytest.raises(DataError, match="put batch after mix"):
        mix(a.batch(4), b)
    with pytest.raises(DataError, match="positive weight"):
        mix(a, b, weights=(1, 0))
    with pytest.raises(DataError, match="split comes after mix"):
        list(mix(a, b).batch(4).split(0.5)[0].batches(0))


def test_mixing_leaves_each_source_its_split_and_functions():
    part = Pipeline(MadeUp(20)).split(0.5, by="order")[1].map(lambda x, y: (x["x"] * 1, y))
    other = Pipeline(MadeUp(5, name="b")).map(lambda x, y: (x["x"] + 100, y))
    (batch,) = mix(part, other).batch(15).batches(0)
    assert sorted(batch.inputs[:, 0].tolist()) == [*range(10, 20), *range(100, 105)]


def test_a_loop_over_the_pipeline_resumes():
    made = Pipeline(MadeUp(30)).shuffle(seed=1).batch(4)
    whole = [batch.indices.tolist() for _ in range(2) for batch in made]
    again = Pipeline(MadeUp(30)).shuffle(seed=1).batch(4)
    taken = []
    for batch in again:
        taken.append(batch.indices.tolist())
        if len(taken) == 3:
            break
    state = again.state_dict()
    assert len(repr(state)) < 300
    later = Pipeline(MadeUp(30)).shuffle(seed=1).batch(4).options(threads=3)
    later.load_state_dict(state)
    taken += [batch.indices.tolist() for _ in range(2) for batch in later]
    assert taken == whole


def test_what_is_explained():
    pipeline = Pipeline(MadeUp(100)).shuffle(seed=1).map(lambda x, y: (x["x"], y)).batch(8).cache()
    list(pipeline.batches(0))
    found = pipeline.explanation()
    assert found.written == ["made_up", "shuffle", "map", "batch", "cache"]
    assert [name.split()[0] for name in found.runs] == [
        "decode",
        "map",
        "CACHE",
        "shuffle",
        "batch",
    ]
    text = str(found)
    assert "cache before shuffle and batch: same batches" in text
    assert "decode" in found.stages
    assert found.as_dict()["runs"] == found.runs


def test_formats_decoded_in_chunks_get_a_cache_before_a_shuffle():
    pipeline = Pipeline(MadeUp(40, random=False)).shuffle(seed=1).batch(8)
    assert "CACHE" in pipeline.explanation().runs
    assert all(
        map(same, pipeline.batches(0), Pipeline(MadeUp(40)).shuffle(seed=1).batch(8).batches(0))
    )
    assert "CACHE" not in Pipeline(MadeUp(40, random=False)).batch(8).explanation().runs


def test_samples_sorted_by_class_are_noticed():
    class Sorted(MadeUp):
        def take(self, numbers, buffers):
            block = super().take(numbers, buffers)
            block.columns["y"] = numbers // 20
            return block

    assert "sorted by class" in "".join(Pipeline(Sorted(100)).batch(8).notes())
    assert not Pipeline(Sorted(100)).shuffle(seed=1).batch(8).notes()
    assert not Pipeline(MadeUp(100)).batch(8).notes()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p.batch(4).batch(8), "batch stands twice"),
        (lambda p: p.shuffle(1).shuffle(2), "shuffle stands twice"),
        (lambda p: p.batch(0), "batch_size: expected an int of at least 1"),
        (lambda p: p.batch(4, last="fill"), "last: expected"),
        (lambda p: p.map(3), "map wants a function, found int"),
        (lambda p: p.cache("tape"), "cache: expected"),
        (lambda p: p.shuffle(1, window=1), "at least 2 rows"),
        (lambda p: p.options(threads=0), "threads is an int of at least 1, found 0"),
        (lambda p: list(p.batches(0)), "makes no batches"),
        (lambda p: list(p.batch(4).batches(0, 99)), "no step 99"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(DataError, match=words):
        make(Pipeline(MadeUp(20)))


def test_an_error_in_a_function_names_the_sample():
    def broken(inputs, target):
        return 1 / (inputs["x"][0].item() - 7), target

    with pytest.raises(ZeroDivisionError) as caught:
        list(Pipeline(MadeUp(20)).map(broken).batch(4).batches(0))
    assert "sample 7: made up:7" in "".join(caught.value.__notes__)


def test_digests_differ_with_what_is_trained_on():
    def first(inputs, target):
        return inputs["x"], target

    def second(inputs, target):
        return inputs["x"] + 1, target

    made = Pipeline(MadeUp(20))
    pipelines = [made, made.map(first), made.map(second), made.split(0.5)[0], made.split(0.5)[1]]
    digests = [pipeline.batch(4).digest for pipeline in pipelines]
    assert len(set(digests)) == 5
    assert made.shuffle(seed=3).batch(5).digest == digests[0]


def test_prefetched_batches_are_the_same():
    made = Pipeline(MadeUp(50)).shuffle(seed=1).batch(8)
    assert all(map(same, made.prefetch("cpu", depth=3).batches(1, 2), made.batches(1, 2)))


def test_torch_datasets():
    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 30

        def __getitem__(self, number):
            return torch.tensor([number, number**2]), number % 3

    made = flatout.data.torch_dataset(Squares()).shuffle(seed=2).batch(7)
    for batch in made.batches(0):
        assert batch.inputs[:, 1].tolist() == (batch.indices**2).tolist()
        assert batch.targets.tolist() == (batch.indices % 3).tolist()
    assert numbers(made) == numbers(Pipeline(MadeUp(30)).shuffle(seed=2).batch(7))
    with pytest.raises(DataError, match="the dataset is empty"):
        flatout.data.torch_dataset(torch.utils.data.TensorDataset(torch.ones(0)))
