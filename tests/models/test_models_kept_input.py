"""What stands for inputs is taken for their features, and else read as what it stands for."""

import copy
import pickle

import numpy as np
import pytest
import torch

from flatout.data import Features
from flatout.models import KeptInput, KeptInputs, autocast_now
from flatout.models.frozen.kept_input import features_of

X = torch.arange(12.0).reshape(4, 3)
KEPT = Features((torch.arange(8.0).reshape(4, 2),))


def given(made=None):
    return KeptInputs(KEPT, X[:1], made, X.clone, autocast_now("cpu"))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x + 1,
        lambda x: torch.stack([x, x]),
        lambda x: x[1],
        lambda x: x[1:3] * 2,
        lambda x: x[:, 1],
        lambda x: torch.cat(list(x)),
        lambda x: torch.from_numpy(np.asarray(x)),
        lambda x: torch.tensor(x.tolist()),
        lambda x: copy.deepcopy(x),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: torch.ops.aten.relu(x),
        lambda x: x.to(torch.float64),
        lambda x: x.detach(),
        lambda x: torch.nn.functional.linear(x, X),
    ],
)
def test_whatever_reads_it_gets_the_inputs(read):
    kept = given()
    found, expected = read(kept.given), read(X)
    assert type(found) is torch.Tensor
    assert torch.equal(found, expected)
    assert kept.was_read
    assert not kept.was_served


def test_its_form_is_known_without_reading():
    kept = given()
    x = kept.given
    assert (x.shape, len(x), x.dtype, x.device, x.dim()) == ((4, 3), 4, X.dtype, X.device, 2)
    assert x.to("cpu") is x
    assert x.float() is x
    assert isinstance(x[1:3], KeptInput)
    assert hash(x) != hash(x[:])
    assert not kept.was_read


def test_features_are_those_of_the_rows():
    kept = given()
    for x, rows in ((kept.given, KEPT[0]), (kept.given[1:], KEPT[0][1:])):
        (found,) = features_of((x,), {})
        assert torch.equal(found, rows)
    (found,) = features_of((kept.given[1:][1:9],), {})
    assert torch.equal(found, KEPT[0][2:])
    assert kept.was_served
    assert not kept.was_read


def test_other_calls_and_changed_inputs_have_none():
    x = given(X.clone()).given
    assert features_of((x, 1), {}) is None
    assert features_of((), {"x": x}) is None
    assert features_of((x, x), {}) is None
    assert features_of((x,), {}) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert features_of((x,), {}) is None
    x.add_(1)
    assert features_of((x,), {}) is None
    assert features_of((given().given.requires_grad_(),), {}) is None
