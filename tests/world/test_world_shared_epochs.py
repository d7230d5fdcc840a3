"""Ranks whose steps do not wait share an epoch out while they train: who is slow takes less."""

import json
from itertools import chain

import pytest
from world_ranks import run

SAMPLES, BATCH, RANKS = 127, 24, 3

SCRIPT = """
    import json
    import os
    import signal
    import sys
    import time
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset, Dataset

    import flatout
    import flatout.train.signals
    from flatout.data import arrays
    from flatout.world import place

    torch.set_num_threads(1)
    folder, samples, batch = Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
    rank, ranks = place().rank, place().world_size
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    y = torch.cat([x[:, :1], torch.arange(samples)[:, None]], dim=1)


    class Plain(Dataset):
        def __len__(self):
            return samples

        def __getitem__(self, number):
            return x[number], y[number]


    def taken_by_others(name):
        # Parts of the first epoch.
        if (folder / name).exists():
            return ranks * samples
        others = [folder / f"{name}-{other}" for other in range(ranks - 1)]
        return sum(int(one.read_text() or 0) for one in others if one.exists())


    class Watches(flatout.Callback):
        every = 1

        def __init__(self, name, waits, stops_at):
            self.name, self.waits, self.stops_at = name, waits, stops_at
            self.seen, self.steps = None, []

        def see(self, numbers):
            if self.seen is None:
                return
            self.now.append(numbers)
            (folder / f"{self.name}-{rank}").write_text(str(len(self.now)))
            # The last rank's first step lasts until others have taken more than their share.
            until = time.monotonic() + 60
            while self.waits and rank == ranks - 1 and taken_by_others(self.name) < 14:
                time.sleep(0.001)
                assert time.monotonic() < until, "no other rank takes what this one leaves"

        def on_epoch_start(self, state):
            self.seen = self.seen or {}
            self.seen[state.epoch] = []
            self.now = self.seen[state.epoch]
            if state.epoch:
                (folder / self.name).touch()

        def on_epoch_end(self, state):
            if state.epoch == 1:
                state.stop("that suffices")

        def on_step(self, state):
            self.steps.append(state.step)
            if self.stops_at is not None and state.step >= self.stops_at:
                self.stops_at = None
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)


    def loss(output, target):
        sys.watches.see(target[:, 1].long().tolist())
        return nn.functional.mse_loss(output, target[:, :1])


    def fit(name, data, *, waits=True, stops_at=None, run=None, epochs=2, staleness="unbounded",
            save=None, schedule=False, servers=2, spare=0, **given):
        watches = Watches(name, waits, stops_at)
        sys.watches = watches  # what a loss refers to tells its job from others
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        world = dict(
            strategy="parameter_server", servers=servers, staleness=staleness, spare_workers=spare
        )
        if schedule:
            once = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=12)
            given["scheduler"], given["schedule_every"] = once, "step"
        trainer = flatout.Trainer(
            model, loss=loss, optimizer=optimizer, allow="exact", say=lambda line: None,
            run=None if run is None else str(run),
            recipe=flatout.Recipe(world=world).replace({"save.every": save}), **given,
        )
        code = history = None
        try:
            history = trainer.fit(
                data, epochs=epochs, progress=False, callbacks=[watches],
                resume=run is not None and run.exists(),
                **({} if isinstance(data, flatout.data.Pipeline) else {"batch_size": batch}),
            )
        except flatout.train.signals.Interrupted as error:
            code = error.code
        return {
            "late": history and history.late, "notes": history.notes if history else [],
            "seen": watches.seen, "steps": watches.steps, "code": code,
            "weights": [p.flatten().tolist() for p in model.state_dict().values()],
            "drawn": int(torch.randint(1 << 30, ())), "rate": optimizer.param_groups[0]["lr"],
            "checkpoints": sorted(os.listdir(run / "checkpoints")) if run else [],
        }


    made = arrays(x, y).shuffle(1).map(lambda x, y: (x, y)).batch(batch)
    found = {
        "arrays": fit("arrays", (x, y), schedule=True),
        "pipeline": fit("pipeline", made, accumulate=2),
        "bounded": fit("bounded", (x, y), staleness=9),
        "spare": fit(
            # So long a run would try settings, for which ranks compare their times.
            "spare", (x, y), staleness="sync", servers=1, spare=1, epochs=1000
        ),
        "a dataset": fit("a dataset", Plain(), waits=False),
        "stopped": fit("stopped", (x, y), stops_at=8, run=folder / "run"),
        "resumed": fit("stopped", (x, y), run=folder / "run"),
        "saved": fit("saved", (x, y), waits=False, run=folder / "saved", save=5),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
"""


def together(parts):
    return list(chain.from_iterable(parts))


@pytest.mark.slow
def test_ranks_share_epochs_out_and_take_each_sample_once_with_stops_and_resumes(tmp_path):
    run(SCRIPT, RANKS, tmp_path, SAMPLES, BATCH)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]

    def seen(name, epoch):
        return [[n for one in r[name]["seen"].get(epoch, []) for n in one] for r in ranks]

    for name in ("arrays", "pipeline", "bounded", "spare", "a dataset", "saved"):
        for epoch in ("0", "1"):
            assert sorted(together(seen(name, epoch))) == list(range(SAMPLES)), name
        for other in ranks[1:]:
            assert other[name]["weights"] == ranks[0][name]["weights"]
            assert other[name]["drawn"] == ranks[0][name]["drawn"]
            assert other[name]["rate"] == ranks[0][name]["rate"]
        for rank in ranks:
            assert rank[name]["steps"] == sorted(set(rank[name]["steps"])), name
            assert rank[name]["steps"][-1] == (6 if name == "pipeline" else 12)
    for name in ("arrays", "pipeline", "bounded", "spare"):
        first, *_, last = (len(own) for own in seen(name, "0"))
        assert last < first
    # Of what is not read by number each rank takes its part of each batch.
    assert [len(own["a dataset"]["seen"]["0"]) for own in ranks] == [6] * RANKS

    # Other steps were made while the last rank made its first one.
    late = ranks[0]["spare"]["late"]
    assert late[-1] >= 1
    assert f"{sum(late)} gradient" in ranks[0]["spare"]["notes"][-1]
    assert ranks[0]["arrays"]["late"] is None

    assert {rank["stopped"]["code"] for rank in ranks} == {143}
    both = [together(seen("stopped", "1")), together(seen("resumed", "1"))]
    assert all(both)
    assert sorted(together(both)) == list(range(SAMPLES))
    assert ranks[0]["saved"]["checkpoints"][-2:] == ["step-000000010", "step-000000012"]
