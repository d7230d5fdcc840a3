"""A model's two parts give what the whole gives, and only what is frozen is kept."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.data import Features, feature_key
from flatout.models import find_cuts, find_rewrites, fused_norms_of, recompute_activations


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.second(self.relu(self.norm(self.first(x)))) + x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.drop(self.blocks(self.stem(x)).mean((2, 3))))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.words = nn.Embedding(20, 6)
        self.head = nn.Linear(22, 3)

    def forward(self, image, words):
        both = [self.image(image).flatten(1), self.words(words).mean(1)]
        return self.head(torch.cat(both, 1))


def made(kind):
    torch.manual_seed(0)
    return kind()


def pictures(count=6):
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def the_same(model, inputs, cut):
    """Outputs and gradients, whole and from features."""
    found = []
    for given in (inputs, cut.prefix(inputs)):
        model.zero_grad()
        torch.manual_seed(5)
        undo = cut.apply()
        parts = given if isinstance(given, tuple) and not isinstance(given, Features) else (given,)
        output = model(*parts)
        undo()
        output.square().sum().backward()
        found.append([output, *(p.grad for p in model.parameters() if p.grad is not None)])
    whole, parts = found
    return len(whole) == len(parts) and all(map(torch.equal, whole, parts))


def test_a_residual_net_is_cut_behind_its_frozen_block():
    model = flatout.freeze(made(Net), until="blocks.0").train()
    found = find_cuts(model, pictures())
    cut = found.cuts[-1]
    assert "blocks.0" in cut.name
    assert {name.partition(".")[0] for name in cut.tensors} == {"stem", "blocks"}
    assert cut.bytes_per_sample == 8 * 6 * 6 * 4
    assert the_same(model, pictures(), cut)
    assert the_same(model, pictures(9), cut)


def test_two_towers_are_kept_both():
    model = made(Towers)
    model.image.requires_grad_(False)
    model.words.requires_grad_(False)
    inputs = pictures(), torch.randint(0, 20, (6, 5))
    cut = find_cuts(model, inputs).cuts[-1]
    assert cut.bytes_per_sample <= 4 * 22
    assert the_same(model, inputs, cut)


class TwoDepths(nn.Module):
    """An image tower gives less than it is given, and a text tower much more."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.MaxPool2d(5))
        self.words = nn.Embedding(20, 64)
        self.reads = nn.Linear(64, 64)
        self.head = nn.Linear(8 * 4 + 64, 3)

    def forward(self, image, words):
        read = self.reads(self.words(words)).flatten(1, 2)
        return self.head(torch.cat([self.image(image).flatten(1), read[:, :64]], 1))


def test_each_tower_is_cut_at_its_own_depth():
    model = made(TwoDepths)
    for part in (model.image, model.words, model.reads):
        part.requires_grad_(False)
    inputs = pictures(), torch.randint(0, 20, (6, 5))
    found = find_cuts(model, inputs)
    few, last = found.cuts[0], found.cuts[-1]
    assert few.bytes_per_sample == 8 * 4 * 4 + 5 * 8
    assert {name.partition(".")[0] for name in few.tensors} == {"image"}
    assert "input 2" in few.name
    assert last.bytes_per_sample == 8 * 4 * 4 + 64 * 4
    assert [cut.name for cut in found.at([few.place])] == [few.name]
    for cut in found.cuts:
        assert the_same(model, inputs, cut)


class Skips(nn.Module):
    """A U-Net whose way down is frozen: its way up reads two depths, one of them in two places."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skip = self.first(x).relu()
        low = self.second(nn.functional.max_pool2d(skip, 2)).relu()
        return self.last(torch.cat([self.up(low), skip], 1)) + skip.mean()


def test_a_skip_is_kept_once_though_it_is_read_in_several_places():
    model = made(Skips)
    for part in (model.first, model.second):
        part.requires_grad_(False)
    found = find_cuts(model, pictures())
    sizes = [cut.bytes_per_sample for cut in found.cuts]
    skip, low = 4 * 12 * 12 * 4, 8 * 6 * 6 * 4
    assert sizes[-1] == skip + low
    assert set(sizes) <= {skip, skip + low}
    assert all(the_same(model, pictures(), cut) for cut in found.cuts)
    few = find_cuts(model, pictures(), skip + low - 1).cuts
    assert skip in [cut.bytes_per_sample for cut in few]


class Scaled(nn.Module):
    def __init__(self, gain=2.0, act=torch.relu, shift=0.0):
        super().__init__()
        self.front, self.head = nn.Linear(16, 4).requires_grad_(False), nn.Linear(4, 2)
        self.gain, self.act, self.shift = gain, act, [shift]
        self.warmth = 1.0

    def forward(self, x):
        shifted = x - torch.tensor(self.shift)
        return self.head(self.act(self.front(shifted)) * self.gain) / self.warmth


@pytest.mark.parametrize(
    "change",
    [{"gain": 3.0}, {"gain": np.float32(3)}, {"act": torch.tanh}, {"shift": 0.5}],
    ids=lambda change: "".join(change),
)
def test_a_forward_that_does_something_else_has_another_key(change):
    def key(**options):
        cut = find_cuts(made(lambda: Scaled(**options)), given).cuts[-1]
        return feature_key(cut.tensors, {"calls": cut.calls})

    given = torch.randn(6, 16)
    before = {name: type(value)(2) for name, value in change.items() if name == "gain"}
    assert key(**before) == key(**before) != key(**change)


def test_tensors_of_outer_names_are_part_of_the_key():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.head = nn.Linear(16, 4).requires_grad_(False), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.front((x - mean) / (deviation + 1)))

    mean, deviation = torch.zeros(16), torch.ones(16)
    given = torch.randn(6, 16)

    def cut():
        return find_cuts(made(Net), given).cuts[-1]

    first, same = cut(), cut()
    assert feature_key(first.tensors, {}) == feature_key(same.tensors, {})
    assert first.is_current()
    deviation[3] = 2
    assert not first.is_current()
    assert feature_key(cut().tensors, {}) != feature_key(same.tensors, {})


def test_norms_that_act_and_dropout_end_the_frozen_part():
    model = made(Net)
    model.stem.requires_grad_(False)
    model.blocks.requires_grad_(False)
    found = find_cuts(model.train(), pictures())
    assert "norm" in found.hindrance
    assert all("norm" not in name for cut in found.cuts for name in cut.tensors)
    whole = find_cuts(flatout.freeze(model, until="blocks").train(), pictures())
    assert whole.cuts[-1].bytes_per_sample == 8 * 4
    assert not whole.hindrance


class Centered(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_what_depends_on_the_rest_of_the_batch_is_not_kept():
    model = nn.Sequential(nn.Linear(4, 4), Centered(), nn.Linear(4, 2), nn.Linear(2, 2))
    model[:3].requires_grad_(False)
    found = find_cuts(model, torch.randn(8, 4))
    assert all("0." in name for cut in found.cuts for name in cut.tensors)
    assert found.hindrance


@pytest.mark.parametrize("change", ["weight", "buffer", "thawed", "mode"])
def test_a_change_of_the_frozen_part_is_noticed(change):
    model = flatout.freeze(made(Net), until="blocks.0").train()
    cut = find_cuts(model, pictures()).cuts[-1]
    model.head.weight.data += 1
    with torch.no_grad():
        model.head.bias.add_(1)
    assert cut.is_current()
    model.eval()
    assert cut.is_current()
    model.train()
    block = model.blocks[0]
    with torch.no_grad():
        if change == "weight":
            block.first.weight[0, 0, 0, 0] += 1
        elif change == "buffer":
            block.norm.running_mean[3] += 1
        elif change == "thawed":
            block.second.bias.requires_grad_(True)
        else:
            block.norm.training = True
    assert not cut.is_current()


def test_copies_and_pickles_of_a_cut_model_are_whole():
    model = flatout.freeze(made(Net), until="blocks.0").eval()
    undo = find_cuts(model, pictures()).cuts[-1].apply()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(pictures()), model(pictures()))
    undo()
    assert "_call_impl" not in vars(model)


class Plain(nn.Module):
    """A straight forward, whose pools a rewrite moves before the activations."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 2), nn.Conv2d(8, 4, 1)])
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU()
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.pool(self.relu(self.convs[0](x)))
        x = self.relu(self.norm(self.convs[1](x)))
        return self.head(self.pool(self.relu(self.convs[2](x))).flatten(1))


@pytest.mark.parametrize("changes", [find_rewrites, fused_norms_of, lambda model: []])
def test_rewrites_may_come_and_go_while_a_model_is_cut(changes):
    model = made(Plain)
    model.convs[0].requires_grad_(False)
    rewrites = changes(model)
    undo = [rewrite.apply() for rewrite in rewrites]
    cut = find_cuts(model, pictures()).cuts[-1]
    assert cut.name == "behind pool (MaxPool2d)"
    assert the_same(model, pictures(), cut)
    state = copy.deepcopy(model.state_dict())
    model.eval()
    with torch.no_grad():
        assert torch.equal(cut.rest(cut.prefix(pictures())), model(pictures()))
    model.train()
    for one in reversed(undo):
        one()
    if changes is find_rewrites:
        assert the_same(model, pictures(), cut)
    model.load_state_dict(state)


def test_a_part_may_recompute_its_activations():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)), nn.Linear(16, 2))
    model[:4].requires_grad_(False)
    undo = recompute_activations(model)
    inputs = torch.randn(6, 16)
    cut = find_cuts(model, inputs).cuts[-1]
    assert cut.name == "behind 3 (Linear)"
    assert the_same(model, inputs, cut)
    undo()


class Words(nn.Module):
    """A transformer whose samples lie in the second dimension."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 32)
        self.place = nn.Parameter(torch.randn(7, 1, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids.T) + self.place).mean(0))


def test_a_transformer_is_cut_between_its_layers():
    model = made(Words)
    inputs = torch.randint(0, 30, (6, 7))
    last = flatout.freeze(model, until="encoder.layers.1").train()
    model.place.requires_grad_(False)
    cut = find_cuts(last, inputs).cuts[-1]
    assert cut.name == "behind encoder.layers.1 (TransformerEncoderLayer)"
    assert cut.bytes_per_sample == 7 * 32 * 4
    assert the_same(model, inputs, cut)


class Padded(Words):
    def forward(self, ids):
        padding = ids == 0
        found = self.encoder(self.embedding(ids.T) + self.place, src_key_padding_mask=padding)
        return self.head(found[0])


def test_a_frozen_transformer_with_a_mask_of_padding_is_kept_as_a_whole():
    model = made(Padded)
    inputs = torch.randint(1, 30, (6, 7))
    inputs[::2, 4:] = 0
    for part in (model.embedding, model.encoder):
        flatout.freeze(part)
    model.place.requires_grad_(False)
    cut = find_cuts(model.train(), inputs).cuts[-1]
    assert cut.bytes_per_sample == 32 * 4
    assert the_same(model, inputs, cut)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        x = self.front(x)
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


def test_attention_may_take_another_kernel_in_evaluation():
    model = made(Attending)
    model.front.requires_grad_(False)
    model.attention.requires_grad_(False)
    inputs = torch.randn(8, 6, 16)
    cut = find_cuts(model.train(), inputs).cuts[-1]
    assert cut.bytes_per_sample == 64
    assert the_same(model, inputs, cut)
    model.eval()
    with torch.no_grad():
        assert torch.equal(cut.rest(cut.prefix(inputs)), model(inputs))


def test_why_nothing_is_kept_where_no_cut_holds():
    class Other(nn.Linear):
        def forward(self, x):
            gain = 2 if type(x) is torch.Tensor else 1
            return super().forward(x) * gain

    model = nn.Sequential(nn.Linear(4, 4), Other(4, 2))
    model[0].requires_grad_(False)
    found = find_cuts(model, torch.randn(6, 4))
    assert not found.cuts
    assert found.hindrance == "forward in two parts gives other numbers than as a whole"


def test_rounding_by_place_is_not_taken_for_a_batch_that_counts():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 256), nn.Linear(256, 4))
    model[:3].requires_grad_(False)
    found = find_cuts(model, torch.randn(32, 1024))
    assert not found.hindrance
    assert found.cuts[-1].bytes_per_sample == 1024


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 8), requires_grad=False)
        self.scale = torch.ones(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(x @ self.weight * self.scale)


def test_weights_that_forward_itself_reads_are_frozen_too():
    cut = find_cuts(made(Projected), torch.randn(6, 64)).cuts[-1]
    assert cut.tensors.keys() == {"weight", "scale"}
    assert cut.bytes_per_sample == 32


class Fading(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * 0.9**self.calls


@pytest.mark.parametrize("spoiled", ["hook", "hook around", "hook of the model", "attribute"])
def test_what_else_happens_in_a_call_keeps_it_from_being_left_out(spoiled):
    torch.manual_seed(0)
    frozen = Fading() if spoiled == "attribute" else nn.Linear(16, 16)
    model = nn.Sequential(nn.Sequential(frozen, nn.Tanh()), nn.Linear(16, 2))
    model[0].requires_grad_(False)
    hooked = {"hook": frozen, "hook around": model[0], "hook of the model": model}.get(spoiled)
    handle = hooked and hooked.register_forward_hook(lambda *call: None)
    found = find_cuts(model, torch.randn(6, 16))
    assert not found.cuts
    assert ("calls" if spoiled == "attribute" else "hook") in found.hindrance
    assert getattr(frozen, "calls", 0) == 0
    if handle is not None:
        handle.remove()
        model[1].register_forward_hook(lambda *call: None)
        assert find_cuts(model, torch.randn(6, 16)).cuts


@pytest.mark.parametrize(
    "change", ["another tensor", "an attribute", "a hook", "another layer", "a forward"]
)
def test_a_change_past_the_tensors_is_noticed(change):
    model = flatout.freeze(made(Net), until="blocks.0").train()
    block = model.blocks[0]
    block.gain = 1.0
    cut = find_cuts(model, pictures()).cuts[-1]
    model.head = nn.Linear(8, 3)
    assert cut.is_current()
    if change == "another tensor":
        block.first.weight = nn.Parameter(block.first.weight.clone(), requires_grad=False)
    elif change == "an attribute":
        block.gain = 0.5
    elif change == "a hook":
        block.norm.register_forward_hook(lambda *call: None)
    elif change == "another layer":
        model.stem = copy.deepcopy(model.stem)
    else:
        block.forward = lambda x: x
    assert not cut.is_current()


def test_what_changes_around_the_frozen_part_is_tried_out():
    model = made(Scaled)
    cut = find_cuts(model, torch.randn(6, 16)).cuts[-1]
    model.warmth = 0.5  # of what is behind it
    assert cut.is_current()
    model.gain = 3.0
    assert not cut.is_current()


def test_an_own_layer_that_begins_to_draw_is_noticed():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16), requires_grad=False)

        def forward(self, x):
            return nn.functional.dropout(x * self.weight, 0.5, self.training)

    model = nn.Sequential(Noisy(), nn.Linear(16, 2))
    assert find_cuts(model.train(), torch.randn(6, 16)).cuts[-1].name == "behind mul in 0"
    model[0].eval()
    cut = find_cuts(model, torch.randn(6, 16)).cuts[-1]
    assert cut.name == "behind 0 (Noisy)"
    model.eval()
    assert cut.is_current()
    model.train()
    state = torch.get_rng_state()
    assert not cut.is_current()
    assert torch.equal(torch.get_rng_state(), state)


def test_keras_layers_are_cut_within_a_model_of_the_model():
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    layers = keras.layers
    base = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3, activation="relu"),
        ]
    )
    image = keras.Input((16, 16, 3))
    head = layers.Dense(3)(layers.Dropout(0.5)(layers.GlobalAveragePooling2D()(base(image))))
    model = keras.Model(image, head)
    for layer in base.layers[:3]:
        layer.trainable = False
    inputs = torch.randn(6, 16, 16, 3)
    cut = find_cuts(model, inputs).cuts[-1]
    assert "MaxPooling2D" in cut.name
    assert cut.bytes_per_sample == 7 * 7 * 8 * 4
    base.layers[1].trainable = True
    assert all("BatchNorm" not in cut.name for cut in find_cuts(model, inputs).cuts)
    assert not cut.is_current()


def test_a_forward_that_wants_whole_batches_is_left_alone():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.head = nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2)

        def forward(self, x):
            if len(x) != 64:
                raise ValueError("expected 64 samples")
            return self.head(self.front(x))

    found = find_cuts(Whole(), torch.randn(64, 3))
    assert not found.cuts
    assert "forward fails on part of a batch: expected 64 samples" in found.hindrance
