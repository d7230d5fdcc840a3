"""A fit looks at its own cuts and at that of the run before, on every rank at the same."""

from types import SimpleNamespace

import torch
from torch import nn

from flatout.models import find_cuts
from flatout.train.parts.features.choice import agreed_cuts

ALONE = SimpleNamespace(gather=lambda value: [value])


def found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 16), nn.Linear(16, 2))
    model[:2].requires_grad_(False)
    return model, find_cuts(model, torch.randn(8, 8))


def test_what_runs_before_kept_is_looked_at_again():
    _model, first = found()
    few, last = first.cuts
    assert (few.bytes_per_sample, last.bytes_per_sample) == (16, 64)
    _model, second = found()
    second.cuts.remove(second.cuts[0])  # as if this run's times spoke for the other alone
    cuts, _ = agreed_cuts(second, "", ALONE, [[0, 99], few.place, last.place])
    assert [cut.name for cut in cuts] == [last.name, few.name]


def test_ranks_whose_times_differ_take_those_of_the_first():
    _, first = found()
    model, second = found()
    asked = []

    def gather(value):
        asked.append(value)
        return [["", [first.cuts[0].place]], value] if len(asked) == 1 else [value, value]

    second.cuts.remove(second.cuts[0])
    cuts, why = agreed_cuts(second, "", SimpleNamespace(gather=gather))
    assert ([cut.name for cut in cuts], why) == ([first.cuts[0].name], "")
    inputs = torch.randn(8, 8)
    assert torch.equal(cuts[0].rest(cuts[0].prefix(inputs)), model(inputs))
    cuts, why = agreed_cuts(
        second,
        "",
        SimpleNamespace(gather=lambda value: [["nothing is numbered", []], value]),
    )
    assert (cuts, why) == ([], "nothing is numbered")
