"""Softmax over the samples of a batch, and over what it may run over."""

import pytest

from observed import observed

START = """
import torch; torch.manual_seed(0)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(96, 6, 4), torch.arange(96) % 3

class Model(nn.Module):
    def __init__(self, weigh):
        super().__init__()
        self.weigh, self.score, self.head = weigh, nn.Linear(4, 1), nn.Linear(4, 3)
    def forward(self, x):
        weights = self.weigh(self.score(x))
        return self.head((weights * x).sum(1))

def train(weigh, shuffle=True, rows=8):
    model = Model(weigh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for given, target in DataLoader(TensorDataset(x, y), rows, shuffle=shuffle):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(given), target).backward()
        optimizer.step()
"""
WRONG = {
    "torch.softmax": "lambda score: torch.softmax(score, dim=0)",
    "a method": "lambda score: score.softmax(0)",
    "by keyword, from the end": "lambda score: torch.softmax(input=score, dim=-3)",
    "functional": "lambda score: nn.functional.softmax(score, 0)",
    "a module without dim": "nn.Softmax()",
    "log_softmax": "lambda score: nn.functional.log_softmax(score, dim=0).exp()",
}
RIGHT = {
    "over the places": "lambda score: torch.softmax(score, dim=1)",
    "places first": "lambda score: score.transpose(0, 1).softmax(0).transpose(0, 1)",
    "detached": "lambda score: score.detach().softmax(0)",
    "not shuffled": "lambda score: torch.softmax(score, dim=0), shuffle=False",
    "as many places as samples": "lambda score: torch.softmax(score, dim=0), rows=6",
    "one sample": "lambda score: torch.softmax(score, dim=0), rows=1",
}


def softmaxes_in(source, folder):
    return observed(folder, f"{START}\ntrain({source})\n").softmaxes


@pytest.mark.parametrize("case", WRONG)
def test_a_softmax_over_samples_is_told_with_its_line(tmp_path, case):
    (found,) = softmaxes_in(WRONG[case], tmp_path)
    assert (found.kind, found.shape) == ("log_softmax" if "log" in case else "softmax", [8, 6, 1])
    assert found.count == 4
    is_module = "module" in case
    line = "weights = self.weigh" if is_module else "train("
    assert found.site.code.startswith(line)


@pytest.mark.parametrize("case", RIGHT)
def test_a_softmax_over_anything_else_is_left_alone(tmp_path, case):
    assert softmaxes_in(RIGHT[case], tmp_path) == []
