import argparse
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flatout.errors import CheckpointError
from flatout.save.model_file import decode, encode
from flatout.values.tree import flatten, unflatten


def there_and_back(state: Any) -> Any:
    """Through the bytes that a checkpoint would hold."""
    tensors, tree = flatten(state)
    text = json.dumps(tree, ensure_ascii=False, allow_nan=False).encode()
    data = b"".join(encode(tensors, where="test"))
    return unflatten(decode(data, "test"), json.loads(text))


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, strides(a)) == (b.dtype, b.shape, strides(b)) and raw(a) == raw(b)
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def strides(tensor: torch.Tensor) -> list[int]:
    """Those that say where values lie."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in pairs if size > 1] if tensor.numel() else []


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


BITS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
BITS += [torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn, torch.complex32]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(BITS))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    size = math.prod(shape) * dtype.itemsize
    content = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if not content:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)
    return tensor.permute(draw(st.permutations(range(len(shape)))))


arrays = hnp.arrays(
    dtype=st.one_of(
        hnp.integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?"),
        hnp.boolean_dtypes(),
        hnp.unicode_string_dtypes(),
        hnp.datetime64_dtypes(),
    ),
    shape=hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.text(st.characters(exclude_categories=())),
    st.binary(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1")]),
    st.lists(st.integers(0, 5)).map(torch.Size),
)
keys = st.one_of(
    st.text(st.characters(exclude_categories=())),
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(),
    st.tuples(st.integers(), st.text()),
    st.just("!"),
)
states = st.recursive(
    st.one_of(scalars, tensors(), arrays, arrays.map(lambda a: a.reshape(-1)[0] if a.size else a)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@given(states)
@settings(deadline=None, max_examples=120)
def test_any_state_comes_back_exactly(state: Any) -> None:
    assert same(there_and_back(state), expected(state))


def expected(state: Any) -> Any:
    """Strides are kept for dense tensors of the types that safetensors has; values always."""
    if isinstance(state, torch.Tensor):
        if state.dtype in (torch.complex128, torch.complex32):
            return state.contiguous()
        return state.clone()
    if isinstance(state, dict):
        return type(state)((k, expected(v)) for k, v in state.items())
    if type(state) in (list, tuple):
        return type(state)(expected(v) for v in state)
    return state


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("-inf"),
        -0.0,
        struct.unpack(">d", bytes.fromhex("fff8000000001234"))[0],
        5e-324,
        2**63,
        -(10**6000),
        {10**6000: 1},
        "\ud800",
        "\ud800\udc00",
        "",
        {"!": "tensor"},
        {1: "a", "1": "b", True and 2: "c"},
        Counter({30: 1, 60: 2}),
        np.float32("nan"),
        np.str_(""),
        np.datetime64("2026-01-01"),
        np.array(3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_awkward_values(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("name", ["channels_last", "transposed", "sliced", "expanded", "conj"])
def test_layouts_keep_values_and_dense_strides(name: str) -> None:
    base = torch.randn(2, 3, 4, 5)
    tensor = {
        "channels_last": base.to(memory_format=torch.channels_last),
        "transposed": base.transpose(1, 3),
        "sliced": base[:, :, ::2],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "conj": torch.randn(3, 2, dtype=torch.complex64).conj().T,
    }[name]
    back = there_and_back(tensor)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.clone().stride()


def test_a_tensor_that_occurs_twice_is_stored_once_and_comes_back_as_one() -> None:
    shared, view = torch.randn(4, 4), torch.randn(8)
    state = {"a": shared, "b": [shared, shared.detach()], "c": view[:4], "d": view[4:]}
    assert len(flatten(state)[0]) == 3
    back = there_and_back(state)
    assert back["a"] is back["b"][0] is back["b"][1]
    assert torch.equal(torch.cat([back["c"], back["d"]]), view)


def test_same_memory_in_another_type_or_shape_is_another_tensor() -> None:
    base = torch.arange(4, dtype=torch.int32)
    state = [base, base.view(torch.float32), base.view(2, 2), torch.empty(0), torch.empty(0, 2)]
    back = there_and_back(state)
    assert all(same(x, y) for x, y in zip(back, state, strict=True))


def test_parameters_come_back_as_plain_tensors() -> None:
    back = there_and_back(torch.nn.Parameter(torch.ones(3)))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


def test_names_that_look_alike_do_not_collide() -> None:
    state = {"a": {"b": torch.zeros(1)}, "a']['b": torch.ones(1), 1: torch.ones(2)}
    state["1"] = torch.zeros(2)
    back = there_and_back(state)
    assert same(back, state)


SCHEDULERS = [
    lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    lambda o: torch.optim.lr_scheduler.ConstantLR(o),
    lambda o: torch.optim.lr_scheduler.LinearLR(o),
    lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    lambda o: torch.optim.lr_scheduler.PolynomialLR(o),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 10),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.MultiStepLR(o, [3])],
        [2],
    ),
    lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
]


@pytest.mark.parametrize("index", range(len(SCHEDULERS)))
def test_state_of_every_scheduler(index: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[index](optimizer)
    for _ in range(3):
        parameter.grad = torch.ones(3)
        optimizer.step()
        scheduler.step(0.5) if index == 10 else scheduler.step()
    state = {"scheduler": scheduler.state_dict(), "optimizer": optimizer.state_dict()}
    assert same(there_and_back(state), state)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.ASGD,
        torch.optim.Adamax,
        torch.optim.LBFGS,
    ],
)
def test_state_of_every_optimizer(make: Any) -> None:
    model = torch.nn.Conv2d(3, 4, 3)
    if make is not torch.optim.LBFGS:  # it views gradients as flat
        model.to(memory_format=torch.channels_last)
    optimizer = make(model.parameters(), lr=0.01)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3, 5, 5)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state_dict()
    assert same(there_and_back(state), state)


def test_random_states() -> None:
    state = [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]
    back = there_and_back(state)
    assert same(back, state)
    random.setstate(back[1])
    np.random.set_state(back[2])


Point = namedtuple("Point", "x")


class Name(str):
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (argparse.Namespace(), "argparse.Namespace"),
        (Point(1), "Point"),
        (Name("a"), "Name"),
        ({1, 2}, "builtins.set"),
        (defaultdict(list), "collections.defaultdict"),
        (len, "builtin_function_or_method"),
        (1j, "builtins.complex"),
        (torch.optim.SGD, "builtins.type"),
        (np.array([object()]), "numpy array of object"),
        (np.zeros(2, dtype=[("a", "i4")]), "numpy array of"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.nn.parameter.UninitializedParameter(), "UninitializedParameter"),
        ({torch.ones(1): 1}, "as a key"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_kept_is_named_with_its_place(value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        flatten({"optimizer": [0, {7: value}]})
    assert kind in str(caught.value)
    assert caught.value.where is not None
    assert "state['optimizer'][1][7]" in caught.value.where


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(CheckpointError, match="contains itself"):
        flatten(state)


def test_the_deepest_state_that_is_taken_can_be_written() -> None:
    state: Any = 0
    for _ in range(100):
        state = ({None: state},) if isinstance(state, dict) else {None: state}
    while True:
        try:
            flatten(state)
            break
        except CheckpointError:
            state = next(iter(state.values())) if isinstance(state, dict) else state[0]
    assert same(there_and_back(state), state)


@pytest.mark.parametrize(
    "tree",
    [
        {"!": "unknown"},
        {"!": "tensor", "name": "absent"},
        {"!": "int"},
        {"!": "dtype", "name": "save"},
        {"!": "tuple"},
        {"!": ["list"]},
        {"!": "array", "name": "t", "dtype": "<f8", "shape": [100]},
        {"!": "scalar", "dtype": "O", "shape": [], "base64": "AAAAAAAAAAA="},
    ],
    ids=str,
)
def test_a_tree_of_another_kind_is_an_error(tree: Any) -> None:
    with pytest.raises(CheckpointError, match="not readable"):
        unflatten({"t": torch.zeros(3, dtype=torch.uint8)}, tree)
