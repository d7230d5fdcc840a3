"""Ranks that each read jagged batches of their own train as one rank does on all of them."""

import pytest
import torch
from world_ranks import run

pytestmark = pytest.mark.slow

JOB = """
    import sys
    from pathlib import Path

    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler

    import flatout
    from flatout.errors import DataError, WorldError
    from flatout.world import place

    folder, size, rank = Path(sys.argv[1]), int(sys.argv[2]), place().rank
    draw = torch.Generator().manual_seed(1)
    rows = [
        (torch.randint(0, 30, (count,), generator=draw), float(count > 2))
        for count in torch.randint(0, 6, (60,), generator=draw).tolist()
    ]
    # Of each step the samples of both ranks, which are not equally many.
    parts = [[range(0, 13), range(13, 20)], [range(20, 24), range(24, 37)], [range(37, 59), [59]]]
    found = {}


    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.last = nn.EmbeddingBag(30, 4, mode="sum"), nn.Linear(4, 1)

        def forward(self, ids, offsets):
            return self.last(self.table(ids, offsets))[:, 0]


    def collate(samples):
        counts = torch.tensor([0, *(len(ids) for ids, _ in samples)])
        ids = torch.cat([ids for ids, _ in samples])
        return (ids, counts.cumsum(0)[:-1]), torch.tensor([y for _, y in samples])


    def loader(steps):
        batches = [[n for part in step for n in part] for step in steps]
        return DataLoader(rows, batch_sampler=batches, collate_fn=collate)


    def own():
        return loader([[step[rank]] for step in parts] if size > 1 else parts)


    def trainer(**options):
        model = Bags()
        options = {"say": lambda line: None, "metrics": ["auc"], **options}
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        return flatout.Trainer(model, loss="binary_cross_entropy", optimizer=adam, **options)


    def fit(name, data, validation=None, stop=0, **options):
        resume = options.pop("resume", False)
        job = trainer(**options)
        history = job.fit(
            data, epochs=3, progress=False, validation_data=validation, callbacks=[Stop(stop)],
            resume=resume,
        )
        figures = [{k: v for k, v in logs.items() if k != "seconds"} for logs in history.epochs]
        weights = {key: value.clone() for key, value in job.model.state_dict().items()}
        found[name] = {"weights": weights, "figures": figures}
        found[f"size of {name}"] = history.batch_size
        return job


    class Stop(flatout.Callback):
        def __init__(self, step):
            self.step = step

        def on_step(self, state):
            if state.step == self.step:
                state.stop("enough")


    def refused(name, data, what=fit):
        try:
            what(name, data)
        except (DataError, WorldError) as error:
            found[name] = str(error)


    whole = [range(start, start + 20) for start in (0, 20, 40)]
    job = fit("own", own(), validation=own())
    found["same for all"] = job.evaluate(loader([[part] for part in whole]))
    found["predicted"] = job.predict(loader([[part] for part in whole]))
    fit("accumulated", own(), accumulate=2)
    run = folder / f"run-{size}"
    recipe = flatout.Recipe(save={"every": 2})
    fit("cut", own(), own(), run=run, recipe=recipe, stop=5)
    fit("resumed", own(), own(), run=run, recipe=recipe, resume=True)
    fit("generator", lambda: iter(own()))
    if size > 1:
        sampler = DistributedSampler(rows, num_replicas=size, rank=rank)
        fit("sampler", DataLoader(rows, 8, sampler=sampler, collate_fn=collate))
        refused("same batches", loader([[part] for part in whole]))
        refused("unlike numbers", loader([[part] for part in whole[rank:]]))
        refused("own predictions", own(), lambda name, data: job.predict(data))
    torch.save(found, folder / f"found-{size}-{rank}.pt")
"""


def test_ranks_with_loaders_of_their_own(tmp_path):
    for size in (1, 2):
        run(JOB, size, tmp_path)
    alone = torch.load(tmp_path / "found-1-0.pt")
    for rank in range(2):
        found = torch.load(tmp_path / f"found-2-{rank}.pt")
        for name in ("own", "accumulated", "resumed", "generator", "same for all", "predicted"):
            torch.testing.assert_close(found[name], alone[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["resumed"], found["own"], rtol=0, atol=0)
        assert found["size of own"] == alone["size of own"] == 20
        assert found["size of sampler"] == 16
        assert "all ranks have read the same batch" in found["same batches"]
        assert "DistributedSampler" in found["same batches"]
        assert "different numbers of batches in an epoch" in found["unlike numbers"]
        assert "have no common order" in found["own predictions"]
