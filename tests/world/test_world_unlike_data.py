"""Ranks whose data differ only in a rank or a path train; ranks with different samples do not."""

import pytest
import torch
from world_ranks import run

JOB = """
    import sys

    import torch
    from torch.utils.data import DataLoader, Dataset

    import flatout
    from flatout.world import place

    RANK = place().rank
    X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    Y = (X.sum(1) > 0).long()


    class Named(Dataset):
        def __init__(self, log):
            self.rank, self.log = RANK, log

        def __len__(self):
            return len(X)

        def __getitem__(self, row):
            return X[row], Y[row]


    class Shifted(Named):
        def __getitem__(self, row):
            return X[row] + self.rank, Y[row]


    def scaled(x, y):
        return x * (2 if RANK < 9 else 3), y


    def scaled_by_rank(x, y):
        return x * (RANK + 1), y


    arrays = flatout.data.arrays(X, Y)
    found = {}
    for name, data in {
        "attributes": Named(f"log{RANK}.txt"),
        "loader": DataLoader(Named("log"), batch_size=8),
        "map": arrays.map(scaled).batch(8),
        "other samples": Shifted("log"),
        "other map": arrays.map(scaled_by_rank).batch(8),
    }.items():
        torch.manual_seed(0)
        lines = []
        trainer = flatout.Trainer(
            torch.nn.Linear(6, 2), loss="cross_entropy", allow="exact", say=lines.append
        )
        size = None if name != "attributes" and name != "other samples" else 8
        try:
            trainer.fit(data, batch_size=size, epochs=1, progress=False)
        except flatout.errors.WorldError as error:
            found[name] = str(error)
        else:
            found[name] = [line for line in lines if "batches are equal" in line]
    torch.save(found, f"{sys.argv[1]}/found{RANK}.pt")
"""


@pytest.mark.slow
def test_data_that_differ_in_a_rank_or_a_path_are_compared_by_their_batches(tmp_path):
    run(JOB, 2, tmp_path, tmp_path)
    found = torch.load(tmp_path / "found0.pt", weights_only=True)
    words = "the data of ranks 0 and 1 read different numbers or texts, such as a rank or a path"
    for name in ("attributes", "loader", "map"):
        assert [line.startswith(words) for line in found[name]] == [True], name
    for name in ("other samples", "other map"):
        assert "ranks 0 and 1 train on different data, of other values" in found[name], name
