"""Ranks that have their own samples train one model, and count every sample once."""

import numpy as np
import pytest
import torch
from world_ranks import run

JOB = """
    import sys
    from pathlib import Path

    import numpy as np
    import torch
    from torch import nn

    import flatout
    from flatout.errors import DataError, WorldError
    from flatout.world import place

    folder, size, rank = Path(sys.argv[1]), int(sys.argv[2]), place().rank
    rng = np.random.default_rng(1)
    x = rng.normal(size=(47, 20)).astype(np.float32)
    y = rng.integers(0, 5, 47)
    found = {}


    def train(name, data, frozen=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
        model[0].requires_grad_(not frozen)
        trainer = flatout.Trainer(
            model, loss="cross_entropy", optimizer="sgd", lr=0.1, metrics=["accuracy"]
        )
        history = trainer.fit(data, validation_data=data, epochs=4, progress=False)
        figures = [{k: v for k, v in logs.items() if k != "seconds"} for logs in history.epochs]
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        found[name] = {"weights": weights, "history": figures, "after": trainer.evaluate(data)}
        return trainer


    whole = flatout.data.arrays(x, y)
    # One step an epoch, so that the order of the samples does not matter.
    train("whole", whole.batch(47))
    train("frozen whole", whole.batch(47), frozen=True)
    if size > 1:
        train("rows", whole.batch(47).shard(by="rows"))
        train("by hand", whole.batch(47).shard(rank, size))
        files = [folder / f"{part}.svm" for part in ("all", "none")]
        one_empty = flatout.data.libsvm(files).batch(47).shard(by="files")
        train("one file is empty", one_empty)
        train("frozen, one file is empty", one_empty, frozen=True)
        filtered = flatout.data.arrays(x + 100 * rank, y).filter(lambda x, y: bool(x[0] < 50))
        train("one is filtered out", filtered.batch(47).shard(rank, size, presharded=True))
        own = slice(0, 30) if rank == 0 else slice(30, 47)
        mine = flatout.data.arrays(x[own], y[own])
        trainer = train("presharded", mine.batch(47).shard(rank, size, presharded=True))
        steps = mine.batch(10).shard(rank, size, presharded=True)
        train("several steps", steps)
        found["steps"] = trainer.fit(steps, epochs=1, progress=False).timeline.steps
        try:
            trainer.predict(whole.batch(47).shard(by="rows"))
        except DataError as error:
            found["predict"] = str(error)
        try:
            trainer.fit(whole.batch(47).shard(0, 3), epochs=1)
        except DataError as error:
            found["another part"] = str(error)
        names = ["red", "green"] if rank == 0 else ["blue", "green"]
        table = {"x": x[:10, 0], "y": names * 5}
        colors = flatout.data.table(table, target="y", stack=True)
        model = nn.Linear(1, 2)
        try:
            trainer = flatout.Trainer(model, loss="cross_entropy", optimizer="sgd", lr=0.1)
            trainer.fit(colors.batch(10).shard(rank, size, presharded=True), epochs=1)
        except WorldError as error:
            found["other classes"] = str(error)
        # Of rows that cannot be read the first rank tells those of the others, too.
        text = folder / f"part{rank}.svm"
        text.write_text("0 1:1 20:2\\n1 3:1\\n" * 6 + "what is this\\n" * rank)
        mine = flatout.data.libsvm(text, on_error="skip").map(lambda i, t: (i.float(), t.long()))
        found["said"] = []
        trainer = flatout.Trainer(
            nn.Linear(20, 2), optimizer="sgd", loss="cross_entropy", lr=0.1,
            say=found["said"].append,
        )
        steps = mine.batch(10).shard(rank, size, presharded=True)
        trainer.fit(steps, epochs=1, progress=False)
    torch.save(found, folder / f"found-{size}-{rank}.pt")
"""


@pytest.mark.slow
def test_ranks_with_rows_of_their_own(tmp_path):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(47, 20)).astype(np.float32), rng.integers(0, 5, 47)
    lines = [
        " ".join([str(label), *(f"{at}:{value!r}" for at, value in enumerate(row, 1))])
        for row, label in zip(x.tolist(), y.tolist(), strict=True)
    ]
    (tmp_path / "all.svm").write_text("\n".join(lines) + "\n")
    (tmp_path / "none.svm").write_text("")
    for size in (1, 2):
        run(JOB, size, tmp_path)
    alone = torch.load(tmp_path / "found-1-0.pt")
    for rank in range(2):
        found = torch.load(tmp_path / f"found-2-{rank}.pt")
        same = ("rows", "by hand", "one file is empty", "one is filtered out", "presharded")
        for name in ("whole", *same):
            torch.testing.assert_close(found[name], alone["whole"], rtol=1e-4, atol=2e-6)
        frozen = found["frozen, one file is empty"]
        torch.testing.assert_close(frozen, alone["frozen whole"], rtol=1e-4, atol=2e-6)
        assert found["steps"] == 5  # 47 samples of both in batches of 10
        assert found["several steps"]["history"][-1]["accuracy"] > 0
        assert "their own samples have no common order" in found["predict"]
        assert "the pipeline is the part of rank 0 of 3" in found["another part"]
        assert "ranks 0 and 1 turn values into numbers differently" in found["other classes"]
        skipped = [line for line in found["said"] if "skipped" in line]
        assert len(skipped) == (rank == 0)
        assert all("part1.svm" in line for line in skipped)
