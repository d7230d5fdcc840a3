import json
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch

from flatout.errors import WorldError
from flatout.world import messages

VALUES = [
    None,
    True,
    -(2**70),
    float("inf"),
    "Gewicht\n",
    b"\0\1",
    (1, [2, (3,)], {"a": None, 4: (5, "6")}),
    OrderedDict(b=1, a=2),
    [],
    {},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_as_it_went(value):
    found = messages.unpack(messages.pack(value))
    assert found == value
    assert type(found) is type(value)


def test_tensors_come_as_they_went():
    value = {
        "a": torch.arange(6.0).view(2, 3).t(),
        "b": [torch.tensor(3, dtype=torch.int16), torch.zeros(0, 4, dtype=torch.bfloat16)],
        "c": (np.arange(4, dtype=np.uint8), np.float32(0.1)),
        "d": torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
    }
    value["again"] = value["a"]
    found = messages.unpack(messages.pack(value))
    for own, there in zip([value["a"], *value["b"], value["d"]],
                          [found["a"], *found["b"], found["d"]], strict=True):  # fmt: skip
        assert own.dtype == there.dtype
        assert torch.equal(own.resolve_conj(), there)
    assert found["again"] is found["a"]
    assert np.array_equal(value["c"][0], found["c"][0])
    assert value["c"][1] == found["c"][1]


def test_what_is_no_plain_data_is_named_and_not_sent():
    with pytest.raises(WorldError, match=r"cannot send a builtins.set") as error:
        messages.pack({"one": [1, {2}]})
    assert error.value.where == "value['one'][1]"


def test_ranks_at_different_collectives_are_named():
    message = messages.pack(1, "settings")
    assert messages.unpack(message, "settings") == 1
    with pytest.raises(WorldError, match=r"'ids of the data', another rank in 'settings'"):
        messages.unpack(message, "ids of the data")


class Planted:
    ran = False

    @staticmethod
    def run():
        Planted.ran = True

    def __reduce__(self):
        return Planted.run, ()


def test_no_pickle_is_ever_run():
    raw = pickle.dumps(Planted())
    for content in (raw, len(raw).to_bytes(8, "little") + raw, b"", b"\2" + bytes(7) + b"[]"):
        with pytest.raises(WorldError, match="no message"):
            messages.unpack(torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8))
    assert not Planted.ran
    pickle.loads(raw)
    assert Planted.ran  # it would have shown


def test_a_head_that_promises_more_than_comes_is_refused():
    message = messages.pack(torch.arange(10))
    with pytest.raises(WorldError, match="no message"):
        messages.unpack(message[:-1])


@pytest.mark.parametrize(
    "row", [["a", "nothing", [1]], ["a", "save", [1]], ["a", "int8", [-1]], ["a", "int8", [2**70]]]
)
def test_a_head_with_tensors_that_cannot_be_is_refused(row):
    head = json.dumps({"value": 1, "tensors": [row]}).encode()
    content = len(head).to_bytes(8, "little") + head + bytes(8)
    with pytest.raises(WorldError, match="no message"):
        messages.unpack(torch.frombuffer(bytearray(content), dtype=torch.uint8))
