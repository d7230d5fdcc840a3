"""A fit looks at its own cuts and at that of the run before, on every rank at the same."""

from types import SimpleNamespace

import torch
from torch import nn

from flatout.models import find_cuts
from flatout.train.frozen_candidates import agreed_cuts, remember

ALONE = SimpleNamespace(is_first=True, gather=lambda value: [value])


def found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 16), nn.Linear(16, 2))
    model[:2].requires_grad_(False)
    return model, find_cuts(model, torch.randn(8, 8))


def test_what_the_run_before_kept_is_looked_at_again(monkeypatch, tmp_path):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    _model, first = found()
    few, last = first.cuts
    assert (few.bytes_per_sample, last.bytes_per_sample) == (16, 64)
    remember(first, few)
    _model, second = found()
    second.cuts.remove(second.cuts[0])  # as if this run's times spoke for the other alone
    names = [cut.name for cut in agreed_cuts(second, "", ALONE)[0]]
    assert names == [last.name, few.name]
    (tmp_path / "features" / f"{second.calls}.cut").write_text("[0, 99]")
    assert [cut.name for cut in agreed_cuts(second, "", ALONE)[0]] == [last.name]


def test_ranks_whose_times_differ_take_those_of_the_first(monkeypatch, tmp_path):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    _, first = found()
    model, second = found()
    asked = []

    def gather(value):
        asked.append(value)
        return [["", [first.cuts[0].place]], value] if len(asked) == 1 else [value, value]

    second.cuts.remove(second.cuts[0])
    cuts, why = agreed_cuts(second, "", SimpleNamespace(is_first=False, gather=gather))
    assert ([cut.name for cut in cuts], why) == ([first.cuts[0].name], "")
    inputs = torch.randn(8, 8)
    assert torch.equal(cuts[0].rest(cuts[0].prefix(inputs)), model(inputs))
    cuts, why = agreed_cuts(
        second,
        "",
        SimpleNamespace(is_first=False, gather=lambda value: [["nothing is numbered", []], value]),
    )
    assert (cuts, why) == ([], "nothing is numbered")
