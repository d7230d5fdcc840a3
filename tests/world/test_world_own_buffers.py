"""Modules that compute a buffer of their own from each rank's part of the batch."""

import json

import pytest
from world_ranks import run

SCRIPT = """
    import json

    import torch
    from torch import nn

    import flatout
    from flatout.errors import ModelError

    torch.set_num_threads(1)


    class Centered(nn.Module):
        def __init__(self, counts):
            super().__init__()
            self.counts = counts
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("seen", torch.zeros(1, dtype=torch.long))

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                    self.seen += int((x > 0).sum()) if self.counts else 1
            return x - self.mean


    x = torch.randn(44, 8, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    found = []
    for counts in (False, True):
        torch.manual_seed(0)
        net, said = nn.Sequential(Centered(counts), nn.Linear(8, 2)), []
        trainer = flatout.Trainer(
            net, loss="cross_entropy", optimizer="sgd", allow="exact", say=said.append
        )
        try:
            trainer.fit((x, y), batch_size=16, epochs=2, progress=False)
            found.append([net[0].mean.tolist(), [line for line in said if "buffer" in line]])
        except ModelError as error:
            found.append(str(error))
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_modules_running_mean_is_averaged_over_all_ranks(tmp_path):
    [one], two = [[json.loads(out) for out, _ in run(SCRIPT, n, tmp_path)] for n in (1, 2)]
    first, second = two
    assert first[0][0] == second[0][0]
    assert first[0][0] == pytest.approx(one[0][0], abs=1e-6)
    assert one[0][1] == []
    assert "module 0 (Centered) computes its buffer 'mean'" in first[0][1][0]
    # Whole numbers that differ between ranks have no mean.
    assert all("module 0 (Centered) computes its buffer 'seen'" in found[1] for found in two)
