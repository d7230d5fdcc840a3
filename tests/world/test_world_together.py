"""What only one rank meets must not leave the others waiting."""

import pytest
import torch
from world_ranks import run

JOB = """
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.data.source import as_source
    from flatout.errors import CheckpointError, FlatoutError
    from flatout.world import join

    folder, world = Path(sys.argv[1]), join()
    found = {}


    class Late:
        # Its first batches are there on the first rank only.

        def __init__(self, source):
            self.source = source

        def __getattr__(self, name):
            return getattr(self.source, name)

        def peek(self, count):
            return self.source.peek(count) if world.is_first else []


    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    source = Late(as_source(torch.ones(8, 4), torch.zeros(8).long(), batch_size=4))
    recipe = flatout.Recipe().replace({"compute.dropout": "by_sample"})
    loop = flatout.Loop(recipe, say=lambda line: None)
    loop.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        compute=lambda batch: nn.functional.cross_entropy(model(batch.inputs), batch.targets),
        data=source,
    )
    found["size"] = loop.first_batches.size
    loop.close()

    trainer = flatout.Trainer(nn.Linear(4, 2), say=lambda line: None)
    (folder / "file").touch()
    try:
        trainer.save(folder / "file" / "model.safetensors")
    except CheckpointError as error:
        found["save"] = error.what


    def fail():
        raise ValueError("of the user's own code")


    try:
        world.by_first(fail)
    except ValueError as error:
        found["own"] = str(error)
    except FlatoutError as error:
        found["own"] = f"{error.what}, {error.where}"
    loop = flatout.Loop(run=folder / "run", say=lambda line: None)
    loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


    def full(*arguments, **options):
        raise CheckpointError("the disk is full")


    if world.is_first:
        vars(loop.checkpoints).update(save=full, wait=full)
    found["full"] = []
    for write in (loop.save, loop.checkpointing.wait):
        try:
            write()
        except CheckpointError as error:
            found["full"].append(error.what)
    found["given"] = world.by_first(lambda: {"rank": world.rank})
    torch.save(found, folder / f"{world.rank}.pt")
"""


@pytest.mark.slow
def test_all_ranks_come_to_the_end(tmp_path):
    run(JOB, 2, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["size"] == second["size"] == 2
    assert first["save"] == second["save"]
    assert first["full"] == second["full"] == ["the disk is full"] * 2
    assert first["own"] == "of the user's own code"
    assert second["own"] == "ValueError: of the user's own code, rank 0"
    assert first["given"] == second["given"] == {"rank": 0}
