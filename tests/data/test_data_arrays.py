from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data.batches.batch import named_tensors
from flatout.data.randomness import order
from flatout.data.sources.arrays.arrays import Arrays, array_source, arrays
from flatout.errors import DataError


def same(a, b):
    """Whether two batches are equal to the bit."""
    pairs = zip(named_tensors("batch", a[:4]), named_tensors("batch", b[:4]), strict=True)
    return a.size == b.size and all(
        name == other and s.dtype == t.dtype and torch.equal(s, t)
        for (name, s), (other, t) in pairs
    )


def _data(samples, form="tensor"):
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 3, generator=generator)
    y = torch.randint(0, 5, (samples,), generator=generator)
    inputs = {
        "tensor": x,
        "tuple": (x, y.float()),
        "dict": {"x": x, "more": (y, x.double())},
        "numpy": x.numpy(),
        "bytes": (x * 50).to(torch.uint8),
    }[form]
    return inputs, y


_FORMS = st.sampled_from(["tensor", "tuple", "dict", "numpy", "bytes"])


@settings(deadline=None)
@given(st.data(), _FORMS, st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 5))
def test_an_epoch_gives_the_rows_of_the_order(data, form, samples, shuffle, drop_last, epoch):
    batch_size = data.draw(st.integers(1, samples))
    inputs, targets = _data(samples, form)
    weight = torch.rand(samples)
    scale = 0.5 if form == "bytes" and data.draw(st.booleans()) else None
    source = array_source(
        inputs,
        targets,
        weight,
        scale=scale,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=9,
        drop_last=drop_last,
    )
    batches = list(source.batches(epoch))
    assert len(batches) == source.steps
    assert sum(batch.size for batch in batches) == source.samples
    rows = torch.from_numpy(order(samples, 9, epoch, shuffle))[: source.samples]
    assert torch.equal(torch.cat([batch.indices for batch in batches]), rows)
    for batch in batches:
        assert torch.equal(batch.targets, targets[batch.indices])
        assert torch.equal(batch.weight, weight[batch.indices])
        for (_, whole), (_, taken) in zip(
            named_tensors("x", source.data.inputs), named_tensors("x", batch.inputs), strict=True
        ):
            expected = whole[batch.indices]
            expected = expected if scale is None else expected.float() * scale
            assert taken.dtype == expected.dtype
            assert torch.equal(taken, expected)


@settings(deadline=None)
@given(st.data(), _FORMS, st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 5))
def test_a_resume_gives_what_a_full_pass_gives(data, form, samples, shuffle, drop_last, epoch):
    inputs, targets = _data(samples, form)
    source = array_source(
        inputs,
        targets,
        batch_size=data.draw(st.integers(1, samples)),
        shuffle=shuffle,
        drop_last=drop_last,
    )
    whole = list(source.batches(epoch))
    start = data.draw(st.integers(0, source.steps))
    resumed = list(source.batches(epoch, start))
    assert len(resumed) == len(whole) - start
    assert all(map(same, resumed, whole[start:]))


def test_batches_in_order_are_views_and_shuffled_ones_are_not():
    x = torch.randn(10, 2)
    batch = list(array_source(x, batch_size=4, shuffle=False).batches(0))[1]
    assert batch.inputs.data_ptr() == x[4:].data_ptr()
    first, *others = array_source(x, batch_size=4).batches(0)
    kept = first.inputs.clone()
    assert all(other.inputs.data_ptr() != first.inputs.data_ptr() for other in others)
    assert torch.equal(first.inputs, kept)


def test_many_batches_in_order_are_views_whose_changes_are_noticed():
    x = torch.arange(1.0, 401.0)
    source = array_source({"x": (x, x)}, batch_size=3, shuffle=False)
    batches = list(source.batches(0, 2))
    assert [batch.size for batch in batches] == [3] * 131 + [1]
    assert torch.equal(torch.cat([batch.inputs["x"][1] for batch in batches]), x[6:])
    versions = source.data.versions
    batches[100].inputs["x"][0].zero_()
    assert source.data.versions != versions
    assert x[306:309].count_nonzero() == 0


def test_memory_is_shared_with_numpy():
    x = np.zeros((4, 2))
    source = array_source(x, batch_size=4, shuffle=False)
    x[1, 1] = 3
    (batch,) = source.batches(0)
    assert batch.inputs.dtype == torch.float64
    assert batch.inputs[1, 1] == 3


def test_images_are_scaled_as_numpy_would():
    images = np.random.default_rng(0).integers(0, 256, (50, 1, 4, 4), np.uint8)
    source = array_source(images, images[:, 0], scale=1 / 255, shift=-0.13, batch_size=16)
    for batch in source.batches(0):
        rows = images[batch.indices.numpy()].astype(np.float32)
        expected = rows * np.float32(1 / 255) + np.float32(-0.13)
        assert batch.inputs.numpy().tobytes() == expected.tobytes()
        assert batch.targets.dtype == torch.uint8


def test_images_that_are_not_contiguous_are_scaled_too():
    images = torch.arange(48, dtype=torch.uint8).view(4, 4, 3).permute(0, 2, 1)
    (batch,) = array_source(images, scale=2.0, batch_size=4, shuffle=False).batches(0)
    assert torch.equal(batch.inputs, images.float() * 2)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "channels last"])
def test_of_arrays_that_are_not_contiguous_no_more_is_copied_than_a_batch(layout):
    whole = np.random.default_rng(0).random((60, 256, 64), np.float32)
    x = {
        "transposed": np.asfortranarray(whole),
        "sliced": whole[:, :, :32],
        "channels last": whole.reshape(60, 64, 64, 4).transpose(0, 3, 1, 2),
    }[layout]
    assert not x.flags.c_contiguous
    made = arrays(x).map(lambda x: x).shuffle(seed=1).batch(3).options(threads=1, depth=1)
    made.peek(1)
    tracemalloc.start()
    for batch in made.batches(0):
        assert torch.equal(batch.inputs, torch.from_numpy(x)[batch.indices])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < x.nbytes / 2


def test_only_bytes_are_scaled_among_several_inputs():
    images, numbers = torch.ones(4, 2, dtype=torch.uint8), torch.ones(4, 2)
    (batch,) = array_source((images, numbers), scale=3.0, batch_size=4).batches(0)
    assert batch.inputs[0].tolist() == [[3.0, 3.0]] * 4
    assert batch.inputs[1].tolist() == [[1.0, 1.0]] * 4


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.float16, np.complex64])
def test_rare_dtypes_are_gathered(dtype):
    x = np.arange(12).astype(dtype)
    x[3] = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else 1e4
    for data in (x, x.reshape(6, 2)):
        for batch in array_source(data, batch_size=5).batches(0):
            assert (batch.inputs.numpy() == data[batch.indices.numpy()]).all()
            assert batch.inputs.numpy().dtype == dtype


def test_peeking_uses_nothing_up():
    source = array_source(torch.arange(10.0), batch_size=3, seed=4)
    assert [batch.size for batch in source.peek(2)] == [3, 3]
    assert len(source.peek(99)) == 4
    assert same(source.peek(1)[0], next(source.batches(0)))


def test_words_for_people():
    images = torch.zeros(1437, 1, 28, 28, dtype=torch.uint8)
    assert (
        array_source(images, scale=1 / 255).describe()
        == "1,437 samples in memory, uint8 1x28x28, shuffled by seed 0"
    )
    assert (
        array_source((torch.zeros(3, 2), torch.zeros(3)), shuffle=False).describe()
        == "3 samples in memory, float32 2 + float32 numbers, in the given order"
    )


def test_label_ranges():
    x = torch.zeros(4, 1)
    assert array_source(x, torch.tensor([3, -1, 7, 0])).labels_range() == (-1, 7)
    assert array_source(x, torch.tensor([3, 1, 200, 0], dtype=torch.uint8)).labels_range() == (
        0,
        200,
    )
    assert array_source(x, np.array([3, 9, 7, 1], np.uint16)).labels_range() == (1, 9)
    for targets in (None, torch.zeros(4), torch.zeros(4, dtype=torch.bool), (x, x)):
        assert array_source(x, targets).labels_range() is None


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.uint16, torch.int64]
)
def test_a_digest_is_of_the_data(dtype):
    x = torch.arange(200).to(dtype)
    digest = Arrays(x).digest
    assert len(digest) == 16
    assert Arrays(x.clone()).digest == digest
    changed = x.clone()
    changed[-1] = changed[0]
    others = [Arrays(changed), Arrays(x[:199]), Arrays(x.view(200, 1)), Arrays((x,)), Arrays(x, x)]
    assert len({digest, *(other.digest for other in others)}) == 6
    assert array_source(x, batch_size=7, seed=3).digest == digest


def test_a_digest_of_rows_without_numbers():
    assert Arrays(torch.empty(3, 0)).digest != Arrays(torch.empty(4, 0)).digest


def test_a_part_is_a_view():
    data = Arrays(torch.arange(10, dtype=torch.uint8), torch.arange(10), scale=0.5)
    part = data.part(6, 10)
    assert len(part) == 4
    assert part.targets.tolist() == [6, 7, 8, 9]
    assert part.scale == 0.5
    assert part.inputs.data_ptr() == data.inputs[6:].data_ptr()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.ones(3), torch.ones(2)), "inputs and targets differ in length: 3 and 2 samples"),
        (
            ({"a": torch.ones(3), "b": torch.ones(4)},),
            r"inputs\['a'\] and inputs\['b'\] differ in length: 3 and 4",
        ),
        ((torch.ones(3), None, torch.ones(2)), "inputs and weight differ in length"),
        ((torch.ones(0, 2), torch.ones(0)), "the data is empty"),
        ((torch.tensor(1.0),), "inputs: expected a row per sample"),
        (
            (torch.ones(2, device="meta"), torch.ones(2)),
            "inputs is on meta, but targets is on cpu",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(arguments, words):
    with pytest.raises(DataError, match=words):
        Arrays(*arguments)


def test_scaling_wants_bytes():
    with pytest.raises(DataError, match="uint8 inputs, found float32"):
        Arrays(torch.ones(2), scale=0.5)
    with pytest.raises(DataError, match="have their own"):
        array_source(Arrays(torch.ones(2)), scale=0.5)


def test_no_step_past_the_end():
    source = array_source(torch.ones(10), batch_size=4)
    with pytest.raises(DataError, match="no step 4 to start from: it has 3 steps"):
        source.batches(0, 4)


def test_pinning_without_an_accelerator_has_no_effect():
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    (batch,) = array_source(
        torch.arange(4.0), batch_size=4, pin_memory=True, shuffle=False
    ).batches(0)
    assert batch.inputs.tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 1 / 255])
def test_data_on_a_gpu_stays_there(scale):
    images = torch.randint(0, 256, (50, 4, 4), dtype=torch.uint8)
    options = {"scale": scale, "shift": None if scale is None else -0.13, "batch_size": 16}
    here = array_source(images, torch.arange(50), **options)
    there = array_source(images.cuda(), torch.arange(50).cuda(), **options)
    assert there.digest == here.digest
    assert there.labels_range() == (0, 49)
    for a, b in zip(here.batches(1), there.batches(1), strict=True):
        assert b.inputs.is_cuda
        assert b.targets.is_cuda
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.inputs, b.inputs.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 1 / 255])
@pytest.mark.parametrize("shuffle", [True, False])
def test_pinned_batches_hold_the_same_values(scale, shuffle):
    images = torch.randint(0, 256, (50, 4, 4), dtype=torch.uint8)
    options = {"scale": scale, "batch_size": 16, "shuffle": shuffle}
    plain = array_source(images, torch.arange(50), **options)
    pinned = array_source(images, torch.arange(50), pin_memory=True, **options)
    for a, b in zip(plain.batches(0), pinned.batches(0), strict=True):
        assert b.inputs.is_pinned()
        assert b.targets.is_pinned()
        assert same(a, b)


def test_small_batches_gathered_together_are_those_of_their_numbers():
    """143 batches, the last of 6 samples; writing into one changes no other."""
    inputs = {
        "a": torch.arange(3000).reshape(1000, 3),
        "b": (torch.randn(1000), torch.arange(1000).to(torch.uint16)),
    }
    targets, weight = torch.arange(1000), torch.rand(1000)
    source = array_source(inputs, targets, weight, batch_size=7)
    whole = [batch.indices.tolist() for batch in source.batches(1)]
    assert [len(rows) for rows in whole] == [7] * 142 + [6]
    assert sorted(row for rows in whole for row in rows) == list(range(1000))
    for rows, batch in zip(whole[33:], source.batches(1, 33), strict=True):
        assert batch.indices.tolist() == rows
        assert batch.size == len(rows)
        assert torch.equal(batch.inputs["a"], inputs["a"][rows])
        assert torch.equal(batch.inputs["b"][0], inputs["b"][0][rows])
        assert batch.inputs["b"][1].tolist() == rows == batch.targets.tolist()
        assert torch.equal(batch.weight, weight[rows])
        batch.inputs["a"].zero_()
    assert torch.equal(inputs["a"], torch.arange(3000).reshape(1000, 3))
