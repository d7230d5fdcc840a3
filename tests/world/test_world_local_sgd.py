"""Ranks that step alone and meet now and then."""

import copy
import json

import pytest
import torch
from torch import nn
from world_ranks import run

from flatout.measure import Profile

SCRIPT = """
    import json
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.strategies import digest_of
    from flatout.world import place

    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), place().rank
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(144, 8, generator=draw)
    y = 2 * x[:, :1] + 0.1 * torch.randn(144, 1, generator=draw)


    def fit(kind, epochs, run=None, samples=144, callbacks=(), data=None, **world):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16) if kind == "norm" else nn.Tanh()
        model = nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if kind == "norm":
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        recipe = flatout.Recipe(world=world)
        trainer = flatout.Trainer(
            model, loss="mse", optimizer=optimizer, recipe=recipe, allow="exact", run=run,
            say=lambda line: None,
        )
        history = trainer.fit(
            data or (x[:samples], y[:samples]), batch_size=None if data else 24, epochs=epochs,
            validation_data=(x, y), shuffle=False, progress=False, resume=run is not None,
            callbacks=list(callbacks),
        )
        logs = {k: v for k, v in history.epochs[-1].items() if k != "seconds"}
        weights = [p.double().flatten().tolist() for p in model.parameters()]
        return logs, sum(weights, []), [digest_of(t) for t in model.state_dict().values()]


    each = dict(strategy="local_sgd", sync_every=1)
    found = {"ddp": fit("plain", 3), "each": fit("plain", 3, **each)}
    found["ragged"] = fit("plain", 3, samples=121, **each)
    found["apart"] = fit("plain", 3, strategy="local_sgd", sync_every=4)
    found["bf16"] = fit("plain", 3, strategy="local_sgd", sync_every=4, compression="bf16")
    is_last = rank == place().world_size - 1
    mine = flatout.data.arrays(x, y).filter(lambda x, y: is_last).batch(24).shard(presharded="rank")
    found["rows of one"] = fit("plain", 3, data=mine, strategy="local_sgd", sync_every=4)
    diloco = dict(strategy="local_sgd", sync_every=4, outer="nesterov")
    found["whole"] = fit("norm", 4, str(folder / "whole"), **diloco)
    fit("norm", 2, str(folder / "parts"), **diloco)
    found["parts"] = fit("norm", 4, str(folder / "parts"), **diloco)

    (folder / f"{rank}.json").write_text(json.dumps(found))
"""


def by_hand(ranks, samples):
    """All ranks step on the one sample of a last batch."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(144, 8, generator=draw)
    y = 2 * x[:, :1] + 0.1 * torch.randn(144, 1, generator=draw)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    for _ in range(3):
        for batch in torch.arange(samples).split(24):
            replicas = [copy.deepcopy(model) for _ in range(ranks)]
            parts = batch.chunk(ranks) if len(batch) > 1 else [batch] * ranks
            for replica, part in zip(replicas, parts, strict=True):
                optimizer = torch.optim.SGD(replica.parameters(), 0.1)
                nn.functional.mse_loss(replica(x[part]), y[part]).backward()
                optimizer.step()
            with torch.no_grad():
                for parameter, *others in zip(
                    model.parameters(), *(one.parameters() for one in replicas), strict=True
                ):
                    parameter.copy_(torch.stack(others).mean(0))
    return [value for p in model.parameters() for value in p.double().flatten().tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_step_alone_meet(tmp_path, ranks):
    run(SCRIPT, ranks, tmp_path)
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    found = by_rank[0]
    assert all(other == found for other in by_rank)
    # 193 weights, and 386 numbers of AdamW with 32 of BatchNorm: in a bucket of 1,024 each.
    whole = Profile.read(tmp_path / "whole")
    assert whole.communication["bytes_per_average"] == 2 * 1024 * 4
    # Each step is the mean of four.
    assert len(whole.steps.step_ms) == whole.steps.steady - 3
    # A meeting after each step of plain SGD makes it one of all ranks.
    assert found["each"][1] == pytest.approx(found["ddp"][1], abs=1e-5)
    for name, value in found["each"][0].items():
        assert value == pytest.approx(found["ddp"][0][name], rel=1e-5)
    assert found["ragged"][1] == pytest.approx(by_hand(ranks, 121), abs=1e-5)
    # A rank without a sample is left out.
    assert found["rows of one"][1] == pytest.approx(by_hand(1, 144), abs=1e-5)
    assert found["apart"][1] != found["ddp"][1]
    assert found["apart"][0]["val_loss"] < 0.5
    assert found["bf16"][2] != found["apart"][2]
    assert found["bf16"][1] == pytest.approx(found["apart"][1], abs=0.01)
    # A resume goes on with the same bits, the outer momentum's included.
    assert found["parts"] == found["whole"]
