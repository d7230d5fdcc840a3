"""Every strategy beside the others: one rank's result on four, and each other's checkpoints."""

import json
import math

import pytest
from world_ranks import run

SCRIPT = """
    import json
    import shutil
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.world import join, place

    torch.set_num_threads(1)
    folder, phase = Path(sys.argv[1]), sys.argv[3]
    rank, ranks = place().rank, place().world_size
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    y = x.sum(dim=1, keepdim=True)
    WORLDS = {
        "ddp": {},
        "fsdp": {},
        "staged": {"micro_batches": 4},
        "copies": {"strategy": "staged", "stages": 2, "micro_batches": 4},
        "parameter_server": {"servers": 2},
        # Averages of each step's changes, momentum included, are those of the mean gradient.
        "local_sgd": {"sync_every": 1},
        "async": {"strategy": "parameter_server", "servers": 2, "staleness": 1},
    }


    def fit(strategy, epochs, run=None, batch=24):
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(6, 1))
        trainer = flatout.Trainer(
            model, loss="mse", optimizer=torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
            allow="exact", run=None if run is None else str(run), say=lambda line: None,
            recipe=flatout.Recipe(world={"strategy": strategy, **WORLDS[strategy]}),
        )
        history = trainer.fit(
            (x, y), batch_size=batch, epochs=epochs, progress=False,
            resume=run is not None and run.exists(),
        )
        trainer.world().wait()
        weights = [p.detach().flatten() for p in model.parameters()]
        return {"weights": torch.cat(weights).tolist(), "loss": history.epochs[-1]["loss"]}


    if ranks == 1:
        found = {"whole": fit("ddp", 3)}
    elif phase == "four":
        found = {strategy: fit(strategy, 3) for strategy in WORLDS}
        for first, then in (("copies", "fsdp"), ("ddp", "copies")):
            fit(first, 1, folder / first)
            found[f"{first} {then}"] = fit(then, 3, folder / first)
    else:
        found = {}
        del WORLDS["copies"]  # for four ranks
        for first in WORLDS:
            fit(first, 1, folder / first)
            for then in WORLDS:
                run = folder / f"{first} {then}"
                if rank == 0:
                    shutil.copytree(folder / first, run)
                join().wait()
                found[f"{first} {then}"] = fit(then, 3, run)
    (folder / f"{phase}{rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one rank comes to."""
    folder = tmp_path_factory.mktemp("one")
    run(SCRIPT, 1, folder, "one")
    return json.loads((folder / "one0.json").read_text())["whole"]


def check(found, whole):
    """Each as one rank, on all ranks; where steps do not wait, alike and finite."""
    first, *others = found
    for name, one in first.items():
        assert all(other[name]["weights"] == one["weights"] for other in others), name
        if "async" in name:
            # At this rate and momentum gradients this late may lead anywhere.
            assert math.isfinite(one["loss"]), name
        else:
            assert one["weights"] == pytest.approx(whole["weights"], abs=1e-5), name
            assert one["loss"] == pytest.approx(whole["loss"], abs=1e-5), name


@pytest.mark.slow
def test_four_ranks_come_to_what_one_does_under_every_strategy_that_claims_it(tmp_path, whole):
    run(SCRIPT, 4, tmp_path, "four")
    check([json.loads((tmp_path / f"four{rank}.json").read_text()) for rank in range(4)], whole)


@pytest.mark.slow
def test_a_checkpoint_of_any_strategy_goes_on_under_any_other(tmp_path, whole, monkeypatch):
    monkeypatch.setenv("FLATOUT_SECRET", "as flatout run makes one")
    run(SCRIPT, 2, tmp_path, "matrix")
    found = [json.loads((tmp_path / f"matrix{rank}.json").read_text()) for rank in range(2)]
    assert len(found[0]) == 36
    check(found, whole)
