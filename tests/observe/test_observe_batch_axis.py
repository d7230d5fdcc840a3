"""Layers that run over the samples of a batch, where targets tell which axis is the text's."""

import pytest

from observed import observed

START = """
import torch; torch.manual_seed(0)
from torch import nn
from torch.nn import functional
text = torch.randint(0, 20, (4000,))

class Model(nn.Module):
    def __init__(self, kind="lstm", batch_first=False):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.memory = nn.LSTM(8, 8, batch_first=batch_first) if kind == "lstm" else None
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.head = nn.Linear(8, 20)
    def forward(self, tokens):
        told = self.table(tokens)
        told = self.block(told) if self.memory is None else self.memory(told)[0]  # here
        return self.head(told)

def rows():
    at = torch.randint(0, 3900, (6,)).tolist()
    return torch.stack([text[i:i + 17] for i in at])

def train(model, loss_of, steps=8):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

def next_tokens(model):
    batch = rows()
    told = model(batch[:, :-1])
    return functional.cross_entropy(told.reshape(-1, 20), batch[:, 1:].reshape(-1))

def time_first(model):
    batch = rows().T
    told = model(batch[:-1])
    return functional.cross_entropy(told.reshape(-1, 20), batch[1:].reshape(-1))

def a_class_a_token(model):
    batch = rows()[:, 1:]
    told = model(batch).transpose(1, 2)
    return functional.cross_entropy(told, (batch * 7 + 3) % 20)
"""
WRONG = {
    "lstm": "train(Model(), next_tokens)",
    "attention": "train(Model('attention'), next_tokens)",
    "a later training": "train(nn.Linear(1, 1), lambda model: model(torch.ones(4, 1)).mean(), 30)\n"
    "train(Model(), next_tokens)",
}
RIGHT = {
    "batch first": "train(Model(batch_first=True), next_tokens)",
    "attention, batch first": "train(Model('attention', True), next_tokens)",
    "time first": "train(Model(), time_first)",
    "targets that are no next tokens": "train(Model(), a_class_a_token)",
}


def layers_in(tmp_path, source):
    return observed(tmp_path, START + source + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_targets_tell_that_samples_lie_where_places_belong(tmp_path, source):
    (layer,) = layers_in(tmp_path, source).over_batch
    assert (layer.shape, layer.by_targets) == ([6, 16, 8], True)
    assert "# here" in layer.site.code


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_other_ways_to_lay_out_texts_are_not_told(tmp_path, source):
    assert layers_in(tmp_path, source).over_batch == []


@pytest.mark.slow
def test_functions_are_looked_at_in_a_later_training(tmp_path):
    seen = layers_in(
        tmp_path,
        """
train(nn.Linear(1, 1), lambda model: model(torch.ones(4, 1)).mean(), 30)
def distance(model):
    told = model(torch.randn(8, 4)).softmax(1)
    return functional.kl_div(told, torch.full((8, 5), 0.2), reduction="batchmean")
train(nn.Linear(4, 5), distance)
""",
    )
    (found,) = [fact for fact in seen.in_losses if fact.detail.get("outer") == "kl_div"]
    assert found.detail["inner"] == "softmax"
