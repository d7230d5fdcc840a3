"""Layers that drop, on a part of the samples as on all of them."""

from __future__ import annotations

import copy
import math
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import _VF, nn
from torch.utils.checkpoint import checkpoint

from flatout.errors import ModelError
from flatout.models.sample_dropout import SampleDropout


@pytest.fixture
def keyed():
    """Makes a model's dropout keyed by sample until the test ends."""
    made = []

    def key(model, seed=1):
        made.append(SampleDropout(model, seed))
        return made[-1]

    yield key
    for one in made:
        one.close()


def look(draws, model, x):
    with torch.no_grad():
        draws.look(lambda count: model(x[:count]))


def forward(draws, model, x, step=1, start=0):
    with draws.step(step):
        draws.at(start, len(x))
        return model(x)


class Written(nn.Module):
    """A forward of one line, on samples in the first dimension."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def attend(x, **given):
    parts = x.unflatten(-1, (2, -1)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(parts, parts, parts, dropout_p=0.4, **given)
    return mixed.transpose(1, 2).flatten(2)


class TimeFirst(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        found = self.layer(x.transpose(0, 1))
        return (found[0] if isinstance(found, tuple) else found).transpose(0, 1)


class TimesSamples(nn.Module):
    """Rows that go through the samples once for each time."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x):
        rows = self.drop(x.transpose(0, 1).flatten(0, 1))
        return rows.unflatten(0, (x.shape[1], -1)).transpose(0, 1)


class SamplesTimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x):
        return self.drop(x.flatten(0, 1)).unflatten(0, (-1, x.shape[1]))


class Shared(nn.Module):
    """What is dropped is a weight: all samples see the same."""

    def __init__(self):
        super().__init__()
        self.drop, self.weight = nn.Dropout(0.4), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.drop(self.weight)


torch.manual_seed(0)
MODELS = {
    "Dropout": nn.Dropout(0.4),
    "Dropout1d": nn.Dropout1d(0.4),
    "Dropout2d": nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Dropout2d(0.4)),
    "Dropout3d": nn.Sequential(nn.Unflatten(1, (3, 2, 1)), nn.Dropout3d(0.4)),
    "AlphaDropout": nn.AlphaDropout(0.4),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.4),
    "function": Written(lambda x: F.dropout(x, 0.4)),
    "two functions": Written(lambda x: F.dropout(F.alpha_dropout(x, 0.2, True), 0.4)),
    "attention": Written(attend),
    "causal attention": Written(lambda x: attend(x, is_causal=True)),
    "time first": TimeFirst(nn.Dropout(0.4)),
    "samples, times": SamplesTimes(),
    "times, samples": TimesSamples(),
    "shared": Shared(),
    "transformer": nn.TransformerEncoderLayer(8, 2, 16, 0.4, batch_first=True),
    "transformer, time first": TimeFirst(nn.TransformerEncoderLayer(8, 2, 16, 0.4)),
    "lstm": TimeFirst(nn.LSTM(8, 4, 3, dropout=0.4, bidirectional=True)),
    "gru": TimeFirst(nn.GRU(8, 8, 2, dropout=0.4)),
    "rnn": TimeFirst(nn.RNN(8, 8, 2, dropout=0.4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_the_samples_alone(name, keyed):
    model = MODELS[name].train()
    draws = keyed(model)
    x = torch.randn(7, 6, 8)
    look(draws, model, x)
    whole = forward(draws, model, x)
    assert not torch.equal(whole, model.eval()(x))
    model.train()
    for start, stop in ((0, 1), (0, 3), (3, 7), (6, 7)):
        part = forward(draws, model, x[start:stop], start=start)
        torch.testing.assert_close(part, whole[start:stop])


@pytest.mark.parametrize("name", MODELS)
def test_every_step_seed_and_call_draws_again(name, keyed):
    model = MODELS[name].train()
    draws, other = keyed(model), None
    x = torch.randn(7, 6, 8)
    look(draws, model, x)
    first = forward(draws, model, x)
    assert torch.equal(forward(draws, model, x), first)
    assert not torch.equal(forward(draws, model, x, step=2), first)
    with draws.step(1):
        draws.at(0, 7)
        assert torch.equal(model(x), first)
        assert not torch.equal(model(x), first)
    draws.close()
    other = keyed(model, seed=2)
    look(other, model, x)
    assert not torch.equal(forward(other, model, x), first)


def test_two_layers_draw_differently(keyed):
    model = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
    draws = keyed(model)
    x = torch.ones(4, 50)
    with draws.step(1):
        draws.at(0, 4)
        first, second = model[0](x), model[1](x)
        assert not torch.equal(first, second)
        draws.at(0, 4)  # in another order, as where a branch was taken
        assert torch.equal(model[1](x), second)
        assert torch.equal(model[0](x), first)


@pytest.mark.parametrize("p", [0.2, 0.5])
@pytest.mark.parametrize(
    "function", [F.dropout, F.alpha_dropout, F.dropout2d, F.feature_alpha_dropout]
)
def test_what_is_dropped_is_what_torch_would_give(function, p, keyed):
    """The same two values for an input of ones, about as often."""
    draws = keyed(nn.Identity())
    x = torch.ones(400, 100, 1, 1, dtype=torch.float64)
    plain = function(x, p, True)
    ours = forward(draws, lambda x: function(x, p, True), x)
    assert torch.allclose(ours.unique(), plain.unique(), rtol=1e-12)
    assert abs(ours.mean() - plain.mean()) < 0.05
    in_place = x.clone()
    again = forward(draws, lambda x: function(x, p, True, True), in_place)
    assert again.data_ptr() == in_place.data_ptr()
    assert torch.allclose(again, ours)


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients(in_place, keyed):
    draws = keyed(nn.Identity())
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def function(x):
        return forward(draws, lambda x: F.dropout(x * x, 0.5, inplace=in_place), x)

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_in_place_on_a_view(keyed):
    draws, found = keyed(nn.Identity()), []
    for in_place in (False, True):
        x = torch.linspace(1, 2, 24).view(4, 6).requires_grad_()
        y = x * 2
        with draws.step(1):
            draws.at(0, 4)
            part = F.dropout(y[:, 1:5], 0.5, inplace=in_place)
        (part if not in_place else y[:, 1:5]).pow(2).sum().backward()
        found.append((part.detach().clone(), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_torchs_own_errors(keyed):
    draws = keyed(nn.Identity())
    with pytest.raises(RuntimeError):
        forward(draws, lambda x: F.dropout(x, 0.5), torch.ones(4, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="between 0 and 1"):
        forward(draws, lambda x: F.dropout(x, 1.5), torch.ones(4, 2))


@pytest.mark.parametrize("mask", [None, "bool", "float", "causal"])
@pytest.mark.parametrize("gqa", [False, True])
def test_attention_is_torchs_but_for_what_is_dropped(mask, gqa, keyed):
    draws = keyed(nn.Identity())
    query = torch.randn(3, 4, 5, 8, requires_grad=True)
    key, value = (torch.randn(3, 2 if gqa else 4, 7, size, requires_grad=True) for size in (8, 9))
    masks = {"bool": torch.rand(5, 7) > 0.3, "float": torch.randn(5, 7)}
    masks["bool"][2] = False  # looks at nothing
    given = {"attn_mask": masks.get(mask), "is_causal": mask == "causal", "enable_gqa": gqa}

    def attention(p):
        with draws.step(1):
            draws.at(0, 3)
            return F.scaled_dot_product_attention(query, key, value, dropout_p=p, **given)

    torch.testing.assert_close(attention(1e-12), attention(0.0))
    attention(0.5).sum().backward()
    assert all(part.grad.isfinite().all() for part in (query, key, value))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_are_torchs_but_for_what_is_dropped(layer, batch_first, keyed):
    plain = layer(5, 4, 3, batch_first=batch_first, bidirectional=True)
    ours = layer(5, 4, 3, batch_first=batch_first, bidirectional=True, dropout=1e-12)
    ours.load_state_dict(plain.state_dict())
    draws = keyed(ours)
    x = torch.randn(6, 6, 5)
    look(draws, Written(lambda x: ours(x if batch_first else x.transpose(0, 1))), x)
    for a, b in zip(_flat(forward(draws, ours, x)), _flat(plain(x)), strict=True):
        assert torch.equal(a, b)


def _flat(found):
    return [part for one in found for part in (one if isinstance(one, tuple) else [one])]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_runs_again_drops_the_same(reentrant, keyed):
    """Even one that the user checkpoints, in the middle of others."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    model = nn.ModuleList([nn.Dropout(0.5), block, nn.Dropout(0.5)])
    draws = keyed(model)
    found = []
    for again in (False, True):
        x = torch.ones(4, 8, requires_grad=True)
        with draws.step(3):
            draws.at(0, 4)
            y = model[0](x)
            y = checkpoint(block, y, use_reentrant=reentrant) if again else block(y)
            y = block(y)
            model[2](y).sum().backward()
        found.append([x.grad, *(p.grad.clone() for p in block.parameters())])
        block.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_outside_of_a_step_all_is_torchs(keyed):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    keys, attention = list(model.state_dict()), F.scaled_dot_product_attention
    x = torch.randn(4, 8)
    torch.manual_seed(5)
    plain = model(x)
    draws = keyed(model)
    assert list(model.state_dict()) == keys
    with pytest.raises(RuntimeError, match="mat1"):
        forward(draws, model, torch.randn(4, 9))
    assert not vars(_VF).keys() & {"dropout", "dropout_", "lstm"}
    assert F.scaled_dot_product_attention is attention
    torch.manual_seed(5)
    assert torch.equal(model(x), plain)
    draws.close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_other_threads_have_torchs(keyed):
    """Such as one that makes the next batch."""
    draws, x, found = keyed(nn.Identity()), torch.ones(5, 3), []

    def elsewhere():
        torch.manual_seed(5)
        found.append(F.dropout(x, 0.5))

    with draws.step(1):
        draws.at(0, 7)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    torch.manual_seed(5)
    assert torch.equal(found[0], F.dropout(x, 0.5))


def test_nothing_is_drawn_that_is_not_wanted(keyed):
    model = nn.Dropout(0.5).eval()
    draws, x = keyed(model), torch.randn(4, 8)
    assert forward(draws, model, x) is x
    with draws.step(1):
        draws.at(0, 4)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert not F.dropout(x, 1.0).any()
        assert F.dropout(x[:0], 0.5).shape == (0, 8)


def test_copies_and_pickles_of_a_model_in_training(keyed):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    keyed(model)
    x = torch.randn(4, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.eval()
        assert torch.equal(other(x), model.eval()(x))


def test_half_precision_keeps_the_mean(keyed):
    """torch rounds 1 / 0.9 to bfloat16 first, and is 0.2% off."""
    x = torch.full((100, 10_000), 1.0, dtype=torch.bfloat16)
    result = forward(keyed(nn.Identity()), lambda x: F.dropout(x, 0.1), x)
    assert result.dtype == torch.bfloat16
    assert math.isclose(result.unique()[-1], 1 / 0.9, rel_tol=2**-8)


# -- what cannot be keyed --------------------------------------------------------------------------


class Mixed(nn.Module):
    """One layer for two shapes."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.drop(x).transpose(0, 1))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = x.flatten(1)
        return self.drop(x @ x.T)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.LSTM(8, 4, 2, dropout=0.5)

    def forward(self, x):
        return self.read(nn.utils.rnn.pack_sequence(list(x)))[0].data


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Mixed(), r"drop \(Dropout\) is given a tensor of shape \(6, 2, 8\)"),
        (Pairs(), r"drop \(Dropout\) is given a tensor of shape \(2, 2\)"),
        (Packed(), r"read \(LSTM\) drops between its layers, in packed sequences"),
        (Written(lambda x: F.dropout(torch.cat([x, x[:1]]))), "a dropout in a written forward"),
    ],
    ids=["two shapes", "pairs of samples", "packed", "one more row"],
)
def test_layers_that_cannot_be_keyed_are_named(model, words, keyed):
    draws = keyed(model)
    with pytest.raises(ModelError, match=words):
        look(draws, model, torch.randn(5, 6, 8))


def test_a_shape_that_was_not_looked_at(keyed):
    model = nn.Dropout(0.5)
    with pytest.raises(ModelError, match=r"shape \(6, 4\), in which samples cannot be told apart"):
        forward(keyed(model), lambda x: model(x.T), torch.randn(4, 6))


@pytest.mark.slow
def test_a_compiled_part_is_named():
    with pytest.raises(ModelError, match="compiled code"):
        SampleDropout(nn.Sequential(torch.compile(nn.Linear(2, 2))), 0)
    model = nn.Linear(2, 2)
    model.compile()
    with pytest.raises(ModelError, match="compiled code"):
        SampleDropout(model, 0)


@pytest.mark.gpu
def test_a_gpu_drops_the_same(keyed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Dropout1d(0.2))
    draws, x = keyed(model), torch.randn(4, 6, 8)
    plain = forward(draws, model, x)
    found = forward(draws, model.cuda(), x.cuda())
    torch.testing.assert_close(found.cpu(), plain)
