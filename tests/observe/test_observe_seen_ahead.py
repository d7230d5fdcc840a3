"""Models that are called again to see whether an output changes with the token it is to tell."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional

from flatout.observe.called_again import can_be_called_again, sees_ahead
from flatout.observe.shifted_targets import place_in

WORDS, ROWS, LENGTH = 24, 6, 12


class Transformer(nn.Module):
    def __init__(self, mask=None, *, is_causal=False, batch_first=True, dropout=0.1, width=16):
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(torch.randn(LENGTH + 4, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, WORDS)
        self.mask, self.is_causal, self.batch_first = mask, is_causal, batch_first

    def embedded(self, words):
        length = words.shape[1 if self.batch_first else 0]
        position = self.position[:length] if self.batch_first else self.position[:length, None]
        return self.table(words) + position

    def forward(self, words):
        length = words.shape[1 if self.batch_first else 0]
        mask = None if self.mask is None else self.mask(length)
        return self.head(self.layers(self.embedded(words), mask, is_causal=self.is_causal))


class Attention(nn.Module):
    """Written by hand, with heads as in tutorials."""

    def __init__(self, weigh, heads=2):
        super().__init__()
        self.weigh = weigh
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(16, 8) for _ in range(3)) for _ in [0] * heads
        )
        self.out = nn.Linear(8 * heads, 16)

    def forward(self, x):
        found = []
        for query, key, value in self.heads:
            q, k, v = query(x), key(x), value(x)
            found.append(self.weigh(q, k, v))
        return x + self.out(torch.cat(found, -1))


def by_hand(allowed, late=False):
    def weigh(q, k, v):
        scores = q @ k.transpose(1, 2) / 4
        length = scores.shape[1]
        if late:
            scores = scores.softmax(-1) * allowed(length)
            return scores / scores.sum(-1, keepdim=True) @ v
        return scores.masked_fill(~allowed(length).bool(), float("-inf")).softmax(-1) @ v

    return weigh


def fused(**options):
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **options)


def attending(weigh):
    return Plain(Attention(weigh), Attention(weigh))


class Plain(nn.Module):
    """Layers between a table and a head."""

    def __init__(self, *layers):
        super().__init__()
        self.table = nn.Embedding(WORDS, 16)
        self.position = nn.Parameter(torch.randn(1, LENGTH + 4, 16))
        self.layers = nn.Sequential(*layers)
        self.head = nn.LazyLinear(WORDS)

    def forward(self, words):
        x = self.table(words) + self.position[:, : words.shape[1]]
        return self.head(self.layers(x))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, *, batch_first=True, **options):
        super().__init__()
        self.table = nn.Embedding(WORDS, 16)
        self.layer = kind(16, 16, batch_first=batch_first, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, WORDS)

    def forward(self, words, states=None):
        outputs, states = self.layer(self.table(words), states)
        return self.head(outputs), states


class Convolution(nn.Module):
    def __init__(self, left, right, norm=None):
        super().__init__()
        self.left, self.right = left, right
        self.layer = nn.Conv1d(16, 16, left + right + 1)
        self.norm = norm or nn.Identity()

    def forward(self, x):
        padded = functional.pad(x.transpose(1, 2), (self.left, self.right))
        return torch.relu(self.norm(self.layer(padded))).transpose(1, 2)


class Spectral(nn.Module):
    """A convolution as long as the sequence, by FFT."""

    def __init__(self, size):
        super().__init__()
        self.kernel, self.size = nn.Parameter(torch.randn(LENGTH, 16)), size

    def forward(self, x):
        length = x.shape[1]
        of = torch.fft.rfft(x, self.size, 1) * torch.fft.rfft(self.kernel, self.size, 0)
        return torch.fft.irfft(of, self.size, 1)[:, :length]


def words(rows=ROWS, length=LENGTH + 1):
    return torch.randint(4, WORDS, (rows, length))


def classes_of(told):
    return told.logits if hasattr(told, "logits") else told[0] if isinstance(told, tuple) else told


def loss_of(told, targets, **options):
    return functional.cross_entropy(told.flatten(0, 1), targets.flatten(), **options)


def split(model, batch):
    """Inputs and targets, as most scripts write it."""
    inputs = batch[:, :-1]
    told = model(inputs)
    return (inputs,), {}, told, loss_of(classes_of(told), batch[:, 1:])


def seen(model, step=split, batch=None):
    """What is found of a model in a step."""
    torch.manual_seed(1)
    batch = words() if batch is None else batch
    args, kwargs, told, loss = step(model, batch)
    given = {"args": args, "kwargs": kwargs}
    place = place_in(torch, model, given, told, loss.grad_fn)
    if place is None:
        return None
    loss.backward()
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    modes = [inner.training for inner in model.modules()]
    result = sees_ahead(torch, model, place)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before[0].items())
    assert torch.equal(before[1], torch.get_rng_state())
    assert modes == [inner.training for inner in model.modules()]
    assert not any(inner._forward_hooks or inner._forward_pre_hooks for inner in model.modules())
    assert (torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_cache_enabled()) == (1, 1)
    return result if result is not None else "nothing"


def causal(length):
    return nn.Transformer.generate_square_subsequent_mask(length)


WRONG = {
    "no mask": lambda: Transformer(),
    "only told that it is causal": lambda: Transformer(lambda n: torch.zeros(n, n)),
    "a mask transposed": lambda: Transformer(lambda n: causal(n).t()),
    "a mask of the wrong sign": lambda: Transformer(lambda n: torch.ones(n, n).tril().bool()),
    "one too far": lambda: attending(by_hand(lambda n: torch.ones(n, n).tril(1))),
    "no mask by hand": lambda: attending(by_hand(lambda n: torch.ones(n, n))),
    "fused": lambda: attending(fused()),
    "added by a layer": lambda: Plain(Added(fused()), Added(fused())),
    "both directions": lambda: Recurrent(bidirectional=True),
    "both directions of a GRU": lambda: Recurrent(nn.GRU, bidirectional=True, num_layers=2),
    "padded on both sides": lambda: Plain(Convolution(1, 1), Convolution(1, 1)),
    "padded by the layer": lambda: Plain(Transposed(nn.Conv1d(16, 16, 3, padding=1))),
    "normalized over the sequence": lambda: Plain(Convolution(2, 0, nn.GroupNorm(1, 16))),
    "around the end": lambda: Plain(Spectral(LENGTH)),
    "attention over an LSTM": lambda: AttendingRecurrent(),
}  # fmt: skip
RIGHT = {
    "a mask": lambda: Transformer(causal),
    "a mask, told": lambda: Transformer(causal, is_causal=True),
    "a mask of booleans": lambda: Transformer(lambda n: torch.triu(torch.ones(n, n), 1).bool()),
    "by hand": lambda: attending(by_hand(lambda n: torch.ones(n, n).tril())),
    "divided behind the softmax": lambda: attending(
        by_hand(lambda n: torch.ones(n, n).tril(), True)
    ),
    "fused": lambda: attending(fused(is_causal=True)),
    "added by a layer": lambda: Plain(Added(fused(is_causal=True)), Added(fused(is_causal=True))),
    "an LSTM": lambda: Recurrent(),
    "a GRU": lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.2),
    "padded on the left": lambda: Plain(Convolution(2, 0), Convolution(3, 0)),
    "with BatchNorm": lambda: Plain(Convolution(2, 0, nn.BatchNorm1d(16))),
    "by FFT": lambda: Plain(Spectral(2 * LENGTH)),
    "token by token": lambda: Plain(nn.Linear(16, 16), nn.ReLU()),
    "mean so far": lambda: Plain(Mean()),
}  # fmt: skip


class Transposed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Added(nn.Module):
    """As in BERT: what a layer gives is added to what it got, and normalized, in one of its own."""

    def __init__(self, weigh):
        super().__init__()
        self.attention, self.added = Attention(weigh, 1), Sum()

    def forward(self, x):
        return self.added(self.attention(x), x)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x, given):
        return self.norm(self.dense(x) + given)


class AttendingRecurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = Recurrent()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, words):
        x, _ = self.lower.layer(self.lower.table(words))
        return self.head(x + self.attention(x, x, x)[0])


def made(make):
    torch.manual_seed(0)
    model = make()
    model(words()[:, :-1])  # layers that are made lazily
    return model


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_a_model_that_sees_ahead_is_told(make):
    found = seen(made(make))
    assert found.change > 1e-3
    assert found.kind


@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_one_that_does_not_is_none(make):
    assert seen(made(make)) == "nothing"


def test_the_layer_in_which_it_begins_is_named():
    assert seen(made(WRONG["no mask"]))[1:] == ("layers.layers.0.self_attn", "MultiheadAttention")
    assert seen(made(WRONG["fused"]))[1:] == ("layers.0", "Attention")
    assert seen(made(WRONG["both directions"]))[1:] == ("layer", "LSTM")
    assert seen(made(WRONG["attention over an LSTM"]))[1:] == ("attention", "MultiheadAttention")


# -- ways to write a step --------------------------------------------------------------------------


def shifted_behind(model, batch):
    told = model(batch)
    return (batch,), {}, told, loss_of(told[:, :-1], batch[:, 1:])


def classes_second(model, batch):
    told = model(batch[:, :-1])
    loss = functional.cross_entropy(told.transpose(1, 2), batch[:, 1:])
    return (batch[:, :-1],), {}, told, loss


def by_keyword(model, batch):
    told = model(words=batch[:, :-1])
    return (), {"words": batch[:, :-1]}, told, loss_of(told, batch[:, 1:], label_smoothing=0.1)


def picked(model, batch):
    told = model(batch[:, :-1])
    logarithms = told.log_softmax(-1).gather(-1, batch[:, 1:, None])
    return (batch[:, :-1],), {}, told, -logarithms.mean()


def logarithms(model, batch):
    told = model(batch[:, :-1]).log_softmax(-1)
    loss = functional.nll_loss(told.reshape(-1, WORDS), batch[:, 1:].reshape(-1))
    return (batch[:, :-1],), {}, told, loss / 4 + 0 * model.head.weight.square().sum()


def ended(model, batch):
    """Rows of unequal lengths, with an end and padding, which the loss leaves out."""
    batch = batch.clone()
    for row in range(len(batch)):
        batch[row, 7 + row % 4 :] = 0
    targets = batch[:, 1:].clone()
    targets[torch.arange(len(batch)), 6 + torch.arange(len(batch)) % 4] = 1
    told = model(batch[:, :-1])
    loss = loss_of(told, targets.where(targets != 0, -100))
    return (batch[:, :-1],), {}, told, loss


def asked(model, batch):
    """Only of answers the loss counts."""
    targets = batch[:, 1:].clone()
    targets[:, :4] = -100
    told = model(batch[:, :-1])
    return (batch[:, :-1],), {}, told, loss_of(told, targets)


STEPS = {
    "shifted behind": shifted_behind,
    "classes second": classes_second,
    "by keyword": by_keyword,
    "picked": picked,
    "logarithms": logarithms,
    "padded": ended,
    "answers": asked,
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_loss_may_be_written_in_many_ways(step):
    assert seen(made(WRONG["no mask"]), step).change > 1e-3
    assert seen(made(RIGHT["a mask"]), step) == "nothing"


@pytest.mark.parametrize("rows", [1, 5, LENGTH, LENGTH + 1])
def test_samples_may_be_as_many_as_tokens(rows):
    batch = words(rows, 4 * LENGTH + 1)[:, : LENGTH + 1] if rows > 3 else words(1, 49)
    for mask in (None, causal):
        torch.manual_seed(0)
        model = Transformer(mask)
        model.position = nn.Parameter(torch.randn(50, 16))
        found = seen(model, batch=batch)
        assert found == "nothing" if mask else found.change > 1e-3


def by_autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        told = model(batch[:, :-1])
        loss = loss_of(told, batch[:, 1:])
    return (batch[:, :-1],), {}, told, loss


@pytest.mark.slow
def test_a_model_may_compute_in_half_precision():
    for make in (RIGHT["fused"], RIGHT["a mask"], RIGHT["padded on the left"]):
        assert seen(made(make).bfloat16()) == seen(made(make), by_autocast) == "nothing"
    for make in (WRONG["fused"], WRONG["no mask"], WRONG["padded on both sides"]):
        assert min(seen(made(make).bfloat16()), seen(made(make), by_autocast)).change > 2e-2


def places_first(model, batch):
    """As the tutorial of torch's."""
    data = batch.t().contiguous()
    told = model(data[:-1])
    return (data[:-1],), {}, told, loss_of(told, data[1:])


def flattened(model, batch):
    data = batch.t().contiguous()
    told = model(data[:-1])
    loss = functional.cross_entropy(told.view(-1, WORDS), data[1:].reshape(-1))
    return (data[:-1],), {}, told, loss


@pytest.mark.parametrize("step", [places_first, flattened])
@pytest.mark.parametrize("rows", [ROWS, LENGTH])
def test_the_sequence_may_come_first(step, rows):
    batch = words(rows)
    torch.manual_seed(0)
    assert seen(Transformer(batch_first=False), step, batch).change > 1e-3
    assert seen(Transformer(causal, batch_first=False), step, batch) == "nothing"


def carried(model, batch):
    """States come from the batch before, and go on."""
    states = tuple(torch.randn(1 + model.layer.bidirectional, len(batch), 16) for _ in range(2))
    told, states = model(batch[:, :-1], states)
    return (batch[:, :-1], states), {}, (told, states), loss_of(told, batch[:, 1:])


def test_states_may_be_given():
    torch.manual_seed(0)
    assert seen(Recurrent(bidirectional=True), carried).kind == "LSTM"
    assert seen(Recurrent(), carried) == "nothing"


class Output(OrderedDict):
    """As a library's model gives it."""

    @property
    def logits(self):
        return self["logits"]


class WithLoss(nn.Module):
    """Computes its loss itself, of labels that are the tokens."""

    def __init__(self, mask=None, *, is_shifted=False):
        super().__init__()
        self.model, self.is_shifted = Transformer(mask), is_shifted

    def forward(self, input_ids=None, labels=None, attention_mask=None):
        told = self.model(input_ids)
        if self.is_shifted:
            told = told.view(-1, WORDS)
            return told, functional.cross_entropy(told, labels.reshape(-1))
        labels = functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        loss = functional.cross_entropy(told.float().view(-1, WORDS), labels.view(-1))
        return Output(loss=loss, logits=told)


def labelled(model, batch):
    given = {"labels": batch, "attention_mask": torch.ones_like(batch), "input_ids": batch}
    told = model(**given)
    return (), given, told, told["loss"]


def with_targets(model, batch):
    told = model(batch[:, :-1], batch[:, 1:])
    return (batch[:, :-1], batch[:, 1:]), {}, told, told[1]


@pytest.mark.parametrize("step", [labelled, with_targets])
def test_the_model_may_compute_the_loss(step):
    for mask in (None, causal):
        torch.manual_seed(0)
        found = seen(WithLoss(mask, is_shifted=step is with_targets), step)
        assert found == "nothing" if mask else found.kind == "MultiheadAttention"


# -- what is to see ahead, or is not known to be called again --------------------------------------


class Autoencoder(nn.Module):
    """A decoder that is to give back what an encoder, which sees all, has made of the tokens."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.table = nn.Embedding(WORDS, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True, bidirectional=how == "both")
        self.decoder = nn.GRU(32 if how == "beside" else 16, 16, batch_first=True)
        self.latent = nn.Linear(32 if how == "both" else 16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.reader = nn.TransformerEncoder(layer, 1)
        layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        self.writer = nn.TransformerDecoder(layer, 2)
        self.query = nn.Linear(16, 16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, words):
        x = self.table(words)
        if self.how == "memory":
            told = self.writer(x, self.reader(x), causal(x.shape[1]))
        elif self.how == "mean":
            latent = self.latent(self.reader(x).mean(1, keepdim=True))
            told = self.decoder(x + latent)[0]
        elif self.how == "table again":
            told = self.decoder(self.table(words) + self.reader(x).mean(1, keepdim=True))[0]
        else:
            states = self.encoder(x)[1]
            latent = torch.cat(list(states), -1) if self.how == "both" else states[-1]
            if self.how in ("both", "drawn"):
                latent = self.latent(latent)
            if self.how == "drawn":
                latent = latent + torch.randn_like(latent)
            if self.how == "beside":
                told = self.decoder(torch.cat([x, latent[:, None].expand_as(x)], -1))[0]
            else:
                told = self.decoder(x, latent[None].contiguous())[0]
        return self.head(told)


@pytest.mark.parametrize(
    "how", ["memory", "mean", "table again", "both", "state", "drawn", "beside"]
)
def test_an_encoder_is_to_see_all(how):
    torch.manual_seed(0)
    assert seen(Autoencoder(how)) == "nothing"


class Translator(nn.Module):
    def __init__(self, mask=None):
        super().__init__()
        self.table, self.mask = nn.Embedding(WORDS, 16), mask
        self.layers = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, source, target):
        mask = None if self.mask is None else self.mask(target.shape[1])
        return self.head(self.layers(self.table(source), self.table(target), tgt_mask=mask))


def translated(model, batch):
    source = batch.flip(1)
    told = model(source, batch[:, :-1])
    return (source, batch[:, :-1]), {}, told, loss_of(told, batch[:, 1:])


def copied(model, batch):
    told = model(batch, batch[:, :-1])
    return (batch, batch[:, :-1]), {}, told, loss_of(told, batch[:, 1:])


def test_what_a_decoder_gets_is_looked_at_and_not_the_source():
    torch.manual_seed(0)
    assert seen(Translator(), translated).change > 1e-3
    assert seen(Translator(causal), translated) == "nothing"
    assert seen(Translator(causal), copied) is None
    assert seen(Translator(), copied) is None


def masked(model, batch):
    hidden = torch.rand(batch.shape) < 0.3
    inputs = batch.masked_fill(hidden, 2)
    told = model(inputs)
    return (inputs,), {}, told, loss_of(told, batch.masked_fill(~hidden, -100))


def same(model, batch):
    told = model(batch)
    return (batch,), {}, told, loss_of(told, batch)


def same_but_the_first(model, batch):
    """The output at a token is compared with this token."""
    told = model(batch)
    return (batch,), {}, told, loss_of(told[:, 1:], batch[:, 1:])


def constant(model, batch):
    batch = torch.arange(4, 4 + ROWS)[:, None].expand(-1, LENGTH + 1)
    return split(model, batch)


def classified(model, batch):
    told = model(batch).mean(1)
    return (batch,), {}, told, functional.cross_entropy(told, batch[:, 0])


def both_ways(model, batch):
    """The next token, and the one before."""
    told = model(batch)
    loss = loss_of(told[:, :-1], batch[:, 1:]) + loss_of(told[:, 1:], batch[:, :-1])
    return (batch,), {}, told, loss


@pytest.mark.parametrize(
    "step", [masked, same, same_but_the_first, constant, classified, both_ways]
)
def test_what_is_no_next_token_is_left_alone(step):
    torch.manual_seed(0)
    model = Transformer()
    model.position = nn.Parameter(torch.randn(LENGTH + 4, 16))
    assert seen(model, step) is None


class Acting(Transformer):
    """Does more than compute, or may."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls, self.cache, self.drawn = how, 0, [], torch.Generator()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, words):
        return getattr(self, self.how)(words)

    def counts(self, words):
        self.calls += 1
        self.seen += 1
        self.cache.append(words)
        self.last = words
        return super().forward(words) + torch.rand((), generator=self.drawn)

    def depends(self, words):
        self.calls += 1
        return super().forward(words) * (1 + self.calls)

    def draws(self, words):
        return super().forward(words) + torch.from_numpy(drawn(words.shape[1]))

    def fails(self, words):
        if not torch.is_grad_enabled():
            raise RuntimeError("it is trained only")
        return super().forward(words)

    def masks(self, words):
        self.mask = causal if self.training else None
        return super().forward(words)


class Printing(Transformer):
    def forward(self, words):
        return self.told(super().forward(words))

    def told(self, x):
        print("a line")
        return x


class Inheriting(Printing):
    def forward(self, words):
        return super().forward(words)


def drawn(length):
    import numpy as np

    return np.random.default_rng().normal(size=(1, length, WORDS)).astype("float32")


def test_what_a_forward_keeps_is_put_back():
    torch.manual_seed(0)
    model = Acting("counts")
    state = model.drawn.get_state()
    assert seen(model).change > 1e-3
    assert (model.calls, float(model.seen), len(model.cache)) == (1, 1, 1)
    assert model.last is model.cache[0]
    assert not torch.equal(state, model.drawn.get_state())  # by the step itself
    torch.rand((), generator=model.drawn)
    twice = torch.Generator()
    torch.rand(2, generator=twice)
    assert torch.equal(model.drawn.get_state(), twice.get_state())
    assert seen(Acting("depends")).change > 1e-3


@pytest.mark.parametrize("how", ["draws", "fails", "masks"])
def test_what_is_not_the_same_again_is_left_alone(how):
    torch.manual_seed(0)
    assert seen(Acting(how)) == "nothing"


@pytest.mark.parametrize("kind", [Printing, Inheriting])
def test_what_does_more_than_compute_is_not_called_again(kind, capsys):
    torch.manual_seed(0)
    assert seen(kind()) == "nothing"
    assert capsys.readouterr().out == "a line\n"


def test_hooks_of_others_are_left_alone():
    model = Transformer()
    assert can_be_called_again(torch, model)
    handle = model.head.register_forward_hook(copy.copy)
    assert not can_be_called_again(torch, model)
    handle.remove()
    model.head.register_forward_hook(lambda layer, given, gave: print(gave))
    assert not can_be_called_again(torch, model)
    assert can_be_called_again(torch, nn.utils.spectral_norm(nn.Linear(2, 2)))
    assert not can_be_called_again(torch, torch.jit.script(nn.Linear(2, 2)))
    assert not can_be_called_again(torch, nn.DataParallel(nn.Linear(2, 2)))
