"""Kept features are those that were put: by slot, in whatever order, until a byte differs."""

from threading import Thread

import numpy as np
import pytest
import torch

from flatout.data.features import files
from flatout.data.features.key import feature_key
from flatout.data.features.row_log import RowPart
from flatout.data.features.store import FeatureStore

MAP = RowPart((4, 3, 5), torch.bfloat16, channels_last=True)
PLAIN = RowPart((7,), torch.float32)
LABEL = RowPart((), torch.int64)
ROW = [MAP, PLAIN, LABEL]


def values_of(slots, row=ROW):
    """Values that tell their slot, in the memory format in which batches have them."""
    made = []
    for part in row:
        of_slots = [
            torch.randn(part.shape, generator=torch.Generator().manual_seed(int(slot)))
            for slot in slots
        ]
        value = (torch.stack(of_slots) * 100).to(part.dtype)
        if part.channels_last:
            value = value.contiguous(memory_format=torch.channels_last)
        made.append(value)
    return made


def assert_holds(store, slots):
    for given, part, expected in zip(store.get(slots), ROW, values_of(slots), strict=True):
        assert given.dtype is part.dtype
        assert torch.equal(given, expected)
        if part.channels_last and len(slots) > 1:
            assert given.is_contiguous(memory_format=torch.channels_last)


@pytest.fixture
def store():
    with_room = FeatureStore.open("key", 100, ROW, "memory")
    yield with_room
    with_room.close()


def test_rows_come_back_in_any_order(store):
    slots = np.array([7, 3, 99, 0])
    assert not store.has(slots).any()
    store.put(slots, values_of(slots))
    assert store.has(np.array([0, 1, 3, 98, 99])).tolist() == [True, False, True, False, True]
    assert_holds(store, np.array([99, 3, 3, 0]))
    assert store.kept == 4
    assert store.bytes == 4 * (4 * 3 * 5 * 2 + 32 + 8)


def test_what_is_there_is_not_put_again(store):
    slots = np.array([1, 2])
    store.put(slots, values_of(slots))
    store.put(np.array([2, 3, 3]), [torch.zeros_like(one) for one in values_of([2, 3, 3])])
    assert_holds(store, slots)
    assert store.kept == 3
    assert store.get(np.array([3]))[1].eq(0).all()


def test_a_row_that_was_never_put_is_named(store):
    with pytest.raises(KeyError, match="slot 5"):
        store.get(np.array([5]))


def test_values_of_another_form_are_refused(store):
    with pytest.raises(ValueError, match=r"expected torch.float32 of shape \(1, 7\)"):
        store.put(np.array([0]), [values_of([0])[0], torch.zeros(1, 8), torch.zeros(1).long()])
    assert store.kept == 0


def test_where_there_is_no_room_the_rest_is_not_kept():
    store = FeatureStore.open("key", 10, [LABEL], "memory", budget=8 * 4)
    told = []
    store.say = told.append
    for slots in (np.arange(3), np.arange(3, 6), np.arange(6, 9)):
        store.put(slots, [torch.from_numpy(slots)])
    assert store.has(np.arange(10)).tolist() == [True] * 4 + [False] * 6
    assert told == [
        "features: memory has no room for more than 4 rows; the others are computed each time"
    ]


def test_memory_that_others_need_is_left_to_them(monkeypatch):
    store = FeatureStore.open("key", 10, [LABEL], "memory", budget=1 << 20)
    told = []
    store.say = told.append
    monkeypatch.setattr(files, "available_bytes", lambda: (512 << 20) + 2 * 8)
    store.put(np.arange(3), [torch.arange(3)])
    assert store.kept == 2
    assert told == [
        "features: memory has no room for more than 2 rows; the others are computed each time"
    ]


def test_threads_that_put_and_get_at_once_agree(store):
    def work(seed):
        order = np.random.default_rng(seed).permutation(100)
        for some in np.split(order, 20):
            absent = some[~store.has(some)]
            if len(absent):
                store.put(absent, values_of(absent))
            assert store.has(some).all()
            assert_holds(store, some)
        done.append(seed)

    done = []
    threads = [Thread(target=work, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]
    assert store.kept == 100


def test_what_was_given_outlives_the_store(store):
    slots = np.arange(50)
    store.put(slots, values_of(slots))
    (_, given, _), (_, expected, _) = store.get(slots), values_of(slots)
    store.close()
    assert torch.equal(given, expected)


# ---- the key ----


def parts_of_key():
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()
    facts = {"autocast": "bfloat16", "input": "0123", "size": [224, 224]}
    return {name: value.clone() for name, value in layers.state_dict().items()}, facts


def change_weight(tensors, facts):
    tensors["0.weight"].view(torch.int32)[0, 0, 0, 0] ^= 1


def change_buffer(tensors, facts):
    tensors["1.running_var"][2] += 1e-6


def change_shape(tensors, facts):
    tensors["1.bias"] = tensors["1.bias"].reshape(2, 2)


def change_dtype(tensors, facts):
    tensors["1.bias"] = tensors["1.bias"].view(torch.int32)


def swap_names(tensors, facts):
    tensors["1.bias"], tensors["1.running_mean"] = (
        tensors["1.running_mean"] + 1,
        tensors["1.bias"] + 0,
    )


def change_fact(tensors, facts):
    facts["size"] = [224, 225]


@pytest.mark.parametrize(
    "change",
    [
        change_weight,
        change_buffer,
        change_shape,
        change_dtype,
        swap_names,
        change_fact,
    ],
)
def test_any_change_gives_another_key(change):
    torch.manual_seed(0)
    tensors, facts = parts_of_key()
    key = feature_key(tensors, facts)
    backwards = dict(reversed(tensors.items()))
    assert feature_key(backwards, dict(reversed(facts.items()))) == key
    change(tensors, facts)
    assert feature_key(tensors, facts) != key


def test_other_arithmetic_gives_another_key():
    key = feature_key({}, {})
    torch.set_float32_matmul_precision("high")
    try:
        assert feature_key({}, {}) != key
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_fact_that_cannot_be_told_apart_is_refused():
    with pytest.raises(TypeError):
        feature_key({}, {"layer": object()})
