"""A callback of one rank, of some or of all ends the training of all ranks after the same step."""

import json

import pytest
from world_ranks import run

SCRIPT = """
    import json
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.world import place

    torch.set_num_threads(1)
    folder, rank, ranks = Path(sys.argv[1]), place().rank, place().world_size
    x = torch.randn(72, 6, generator=torch.Generator().manual_seed(1))
    y = x.sum(dim=1, keepdim=True)
    LAST, SOME, ALL = {ranks - 1}, set(range(1, ranks)), set(range(ranks))
    found, watched = {}, {}


    class Stops(flatout.Callback):
        every = 1

        def __init__(self, who, event, step):
            self.who, self.event, self.step = who, event, step
            self.has_stopped = False

        def _stop(self, event, state):
            # Where ranks claim parts of an epoch, not each comes to each step.
            is_due = event == self.event and state.step >= self.step
            if rank in self.who and is_due and not self.has_stopped:
                self.has_stopped = True
                state.stop(f"rank {rank} has enough")

        def on_fit_start(self, state):
            self._stop("fit", state)

        def on_epoch_start(self, state):
            self._stop("epoch", state)

        def on_step(self, state):
            self._stop("step", state)

        def on_checkpoint(self, state, path):
            self._stop("checkpoint", state)

        def on_epoch_end(self, state):
            self._stop("epoch end", state)

        def on_fit_end(self, state):
            watched["ended"] = [state.step, state.history.stop_reason]


    def fit(name, who, step, event="step", run=None, **world):
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        recipe = flatout.Recipe(world={"patience": 3, **world}, save={"every": 2})
        trainer = flatout.Trainer(
            model, loss="mse", optimizer=optimizer, allow="exact", recipe=recipe, run=run,
            say=lambda line: None,
        )
        # Six steps make an epoch.
        trainer.fit(
            (x, y), batch_size=12, epochs=2, progress=False, callbacks=[Stops(who, event, step)]
        )
        found[name] = watched.pop("ended")


    fit("ddp, last", LAST, 2)
    fit("ddp, some", SOME, 2)
    fit("ddp, all", ALL, 2)
    fit("ddp, all but later", ALL, 8)
    fit("ddp, last of an epoch", LAST, 6)
    fit("ddp, end of an epoch", LAST, 6, "epoch end")
    fit("ddp, begin", LAST, 0, "fit")
    fit("ddp, begin of an epoch", LAST, 6, "epoch")
    fit("ddp, checkpoint", LAST, 2, "checkpoint", str(folder / "run"))
    fit("fsdp", LAST, 2, strategy="fsdp")
    fit("staged", LAST, 2, strategy="staged", micro_batches=2)
    fit("servers", LAST, 2, strategy="parameter_server", servers=2)
    fit("spare", LAST, 2, strategy="parameter_server", servers=1, spare_workers=1)
    fit("asynchronous", LAST, 2, strategy="parameter_server", servers=1, staleness=2)
    fit("local", LAST, 2, strategy="local_sgd", sync_every=4)
    (folder / f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_all_ranks_end_together_whichever_asks(tmp_path, ranks):
    run(SCRIPT, ranks, tmp_path)
    found, *others = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    last, first = f"rank {ranks - 1} has enough", "rank 0 has enough"
    # Where steps do not wait, a rank may have made others when it hears of it.
    apart = [found.pop(name) for name in ("spare", "asynchronous")]
    for one in others:
        apart += [one.pop(name) for name in ("spare", "asynchronous")]
        assert {name: step for name, (step, _) in one.items()} == {
            name: step for name, (step, _) in found.items()
        }
    assert all(reason == last for _, reason in apart)
    assert all(2 <= step < 12 for step, _ in apart)
    assert found == {
        "ddp, last": [3, last],
        "ddp, some": [3, "rank 1 has enough"],
        "ddp, all": [2, first],
        "ddp, all but later": [8, first],
        "ddp, last of an epoch": [6, last],
        "ddp, end of an epoch": [6, last],
        "ddp, begin": [0, last],
        "ddp, begin of an epoch": [8, last],
        "ddp, checkpoint": [3, last],
        "fsdp": [3, last],
        "staged": [3, last],
        "servers": [3, last],
        "local": [4, last],
    }
