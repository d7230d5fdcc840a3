"""Tables whose rows lie on several ranks while they train."""

import json

import pytest
import torch
from world_ranks import run, start

from flatout.kernels import table_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent"),
]

MODEL = """
    import json
    import shutil
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.world import place

    torch.set_num_threads(1)
    folder, size, rank = Path(sys.argv[1]), int(sys.argv[2]), place().rank
    ROWS = 9000
    draw = torch.Generator().manual_seed(1)
    # The last batch of an epoch has 5 samples.
    x = (torch.rand(165, 4, generator=draw) ** 3 * ROWS).long()
    y = (x.sum(1) % 2).float()[:, None]


    class Clicks(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.users, self.more = nn.Embedding(ROWS, 8), nn.Embedding(ROWS, 10)
            self.items = nn.Embedding(ROWS, 8, padding_idx=3)
            self.bag = nn.EmbeddingBag(ROWS, 8, mode="mean")
            self.never = nn.Embedding(ROWS, 8)
            self.few = nn.Embedding(2000, 8)
            self.head = nn.Linear(8, 1)

        def forward(self, x):
            user = x[:, 0]
            read = self.users(user) + self.items(x[:, 1:3]).sum(1) + self.bag(x)
            read = read + self.more(user)[:, :8]  # by the same ids
            return self.head(read + self.few(x[:, 3] % 2000))


    said = []


    def trainer_of(
        model, tables, rate=1e-2, make=torch.optim.Adam, world=(), memory=(), precision="fp32",
        **given,
    ):
        recipe = flatout.Recipe(
            compute={"touched_rows": "on", "precision": precision},
            world={"tables": tables, **dict(world)},
            memory=dict(memory),
        )
        if tables == "sharded":
            recipe = recipe.replace({"compute.touched_rows": "auto"})
        options = {"allow": "exact", **given}
        optimizer = make(model.parameters(), lr=rate)
        options = {"loss": "binary_cross_entropy", **options}
        return flatout.Trainer(
            model, optimizer=optimizer, recipe=recipe, say=said.append, **options
        )


    def fit(tables, make=torch.optim.Adam, rate=1e-2, epochs=2, resume=False, **given):
        model = Clicks()
        trainer = trainer_of(model, tables, rate, make, **given)
        history = trainer.fit(
            x, y, batch_size=16, epochs=epochs, validation_data=(x, y), progress=False,
            resume=resume,
        )
        lines.extend(history.notes)
        found = {name: value.clone() for name, value in model.state_dict().items()}
        state = trainer.optimizer.state_dict()["state"]
        for number, held in state.items():
            found |= {f"{n} of {number}": v for n, v in held.items() if v.dim() == 2}
        found["val"] = torch.tensor([epoch["val_loss"] for epoch in history.epochs])
        return found


    lines = []
    CASES = {
        "adam": {},
        "adagrad": {"make": torch.optim.Adagrad, "rate": 0.1},
        "clipped and accumulated": {"clip_norm": 0.02, "accumulate": 3},
        "micro-batches": {"memory": {"micro_batch": 3}, "clip_value": 1e-3},
    }
"""

JOB = (
    MODEL
    + """
    half, copied = str(folder / "half"), str(folder / "copied")
    found = {}
    for name, case in CASES.items() if size < 4 else ():
        found[name + ", replicated"] = fit("replicated", **case)
        if size == 2 and name != "adam":
            found[name] = fit("sharded", **case)
    if size == 2:
        fit("sharded", epochs=1, run=half)
        if rank == 0:
            shutil.copytree(half, copied)
        found["adam"] = fit("sharded", run=half, resume=True)
        # Settings are looked at on each rank alone before tables are sharded.
        fit("sharded", epochs=1, allow="tolerant", precision="auto")
        assert "sharded over 2 ranks" in " ".join(lines[-3:]) or rank, lines
    if size == 4:
        found["adam"] = fit("sharded")
        found["adam, resumed"] = fit("sharded", run=copied, resume=True)
    if size == 1:
        found["adam, resumed"] = fit("sharded", run=copied, resume=True)
    torch.save([found, said + lines], folder / f"found-{size}-{rank}.pt")
"""
)


def far(one, other):
    return max(
        float((value - other[name]).norm() / other[name].norm().clamp_min(1e-12))
        for name, value in one.items()
    )


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_ranks_end_as_one_and_as_those_that_have_all_rows(tmp_path):
    for size in (2, 1, 4):
        run(JOB, size, tmp_path)
    alone, _ = torch.load(tmp_path / "found-1-0.pt")
    assert far(alone["adam, resumed"], alone["adam, replicated"]) <= 1e-5
    for size in (2, 4):
        first, said = torch.load(tmp_path / f"found-{size}-0.pt")
        assert any(f"sharded over {size} ranks" in line for line in said)
        sharded = {c: f for c, f in first.items() if not c.endswith("replicated")}
        assert len(sharded) == (4 if size == 2 else 2)
        for case, found in sharded.items():
            wanted = f"{case.removesuffix(', resumed')}, replicated"
            assert far(found, alone[wanted]) <= 1e-5, (size, case)
            if size == 2 and "clipped" not in case:  # a norm is added up in another order
                assert same(found, first[wanted]), case
        for rank in range(1, size):
            other, _ = torch.load(tmp_path / f"found-{size}-{rank}.pt")
            for case, found in first.items():
                assert same(other[case], found), (size, rank, case)


APART = (
    """
    import os

    # As if each rank had its own node: what they exchange goes through sockets.
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"GROUP_RANK": os.environ["RANK"], "GROUP_WORLD_SIZE": os.environ["WORLD_SIZE"]}
"""
    + MODEL
    + """
    found, whole = fit("sharded"), fit("replicated")
    for name, value in found.items():
        assert (value - whole[name]).norm() <= 1e-5 * whole[name].norm(), name
"""
)


def test_ranks_of_several_nodes_end_as_those_that_have_all_rows(tmp_path):
    run(APART, 3, tmp_path)


ODD = (
    MODEL
    + """
    from flatout.errors import FlatoutError
    from flatout.train.callbacks import Callback
    found = {}


    def error_of(model, inputs=x, **given):
        callbacks = given.pop("callbacks", [])
        try:
            trainer_of(model, "sharded", **given).fit(
                inputs, y, batch_size=16, epochs=1, shuffle=False, progress=False,
                callbacks=callbacks,
            )
        except (FlatoutError, IndexError) as error:
            return f"{type(error).__name__}: {error}"
        return "none"


    class Choosy(Clicks):
        def forward(self, x):
            read = super().forward(x)
            # A table that one rank has no use for in the third step.
            if self.seen == 2 and rank == 0:
                read = read + self.never(x[:, 0]).sum(1, keepdim=True)
            self.seen += self.training
            return read


    class Late(Clicks):
        # Reads a table whole, but not in the first steps.
        seen = 0

        def forward(self, x):
            self.seen += self.training
            read = super().forward(x)
            return read if self.seen < 5 else read + self.users.weight.sum() * 1e-9


    # Two tables are read whole, one by the loss and one by no more than a look.
    def penalized(model):
        def loss(outputs, targets):
            model.norm = float(model.more.weight.detach().norm())
            decay = 1e-5 * model.users.weight.square().sum()
            return nn.functional.binary_cross_entropy_with_logits(outputs, targets) + decay

        return loss


    class Spoiled(Clicks):
        def forward(self, x):
            return super().forward(x.nan_to_num(1.0).long()) + 0 * x.sum(1, keepdim=True)


    class Reads(Callback):
        every = 2

        def on_step(self, state):
            state.trainer.model.state_dict()


    class Stops(Callback):
        every = 3

        def on_step(self, state):
            state.stop("enough")


    choosy = Choosy()
    choosy.seen = -1000
    class Begins(Callback):
        def on_fit_start(self, state):
            choosy.seen = 0

    found["choosy"] = error_of(choosy, callbacks=[Begins()])
    found["late"] = error_of(Late())
    ends = {}
    for tables in ("sharded", "replicated"):
        model = Clicks()
        trainer = trainer_of(model, tables, loss=penalized(model))
        history = trainer.fit(x, y, batch_size=16, epochs=2, progress=False)
        found[f"whole, {tables}"] = history.notes
        ends[tables] = model.state_dict()
    found["whole"] = max(
        float((value - ends["replicated"][name]).norm() / value.norm())
        for name, value in ends["sharded"].items()
    )
    reads = Clicks()
    found["reads"] = error_of(reads, callbacks=[Reads()])
    try:
        reads.state_dict()
    except FlatoutError as error:
        found["read later"] = str(error)
    counted = Clicks()
    counted.items.scale_grad_by_freq = True
    found["counted"] = error_of(counted)
    found["local"] = error_of(Clicks(), world={"strategy": "local_sgd"})

    stopped = {}
    for tables in ("sharded", "replicated"):
        model = Clicks()
        trainer_of(model, tables).fit(
            x, y, batch_size=16, epochs=1, progress=False, callbacks=[Stops()]
        )
        stopped[tables] = model.state_dict()
    wanted = stopped["replicated"]
    found["stopped alike"] = all(
        torch.equal(value, wanted[name]) for name, value in stopped["sharded"].items()
    )
    tried = Clicks()
    open_ = trainer_of(tried, "sharded", allow="tolerant")
    open_.fit(x, y, batch_size=16, epochs=20, progress=False)
    found["tried"] = bool(torch.isfinite(tried.users.weight).all())


    def steps_of(loop, model):
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        compute = lambda batch: nn.functional.binary_cross_entropy_with_logits(
            model(batch.inputs), batch.targets
        )
        source = flatout.data.as_source(x, y, batch_size=16, shuffle=False)
        loop.prepare(model, optimizer, compute=compute, data=source, steps=10)
        for batch in loop.batches(source):
            loop.step(compute, batch)
        loop.close()
        return model.users.weight.detach().clone()


    own = {}
    for tables in ("sharded", "replicated"):
        recipe = flatout.Recipe(compute={"touched_rows": "on", "precision": "fp32"},
                                world={"tables": tables})
        own[tables] = steps_of(flatout.Loop(recipe, allow="exact", say=said.append), Clicks())
    found["own loop"] = torch.equal(own["sharded"], own["replicated"])

    (folder / f"odd-{rank}.json").write_text(json.dumps(found))
    # What is wrong is on the last rank alone.
    spoiled, bad = Spoiled(), x.float()
    bad[31, 1] = float("nan")
    found["nan"] = error_of(spoiled, bad)
    found["untouched"] = all(bool(v.isfinite().all()) for v in spoiled.state_dict().values())
    bad = x.clone()
    bad[31, 1] = ROWS
    found["id"] = error_of(Clicks(), bad)
    (folder / f"odd-{rank}.json").write_text(json.dumps(found))
"""
)


def test_what_ranks_cannot_do_with_parts_of_tables_is_said(tmp_path):
    ranks = start(ODD, 2, tmp_path)
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for rank in range(2):
        found = json.loads((tmp_path / f"odd-{rank}.json").read_text())
        assert found["choosy"].startswith("ModelError: ranks look up rows of tables in different")
        assert found["whole"] <= 1e-5
        if rank == 0:
            # Looked at before the first step, so that one line tells it.
            (line,) = (one for one in found["whole, sharded"] if one.startswith("tables: "))
            assert line.startswith("tables: 4 of 29,000 rows · touched rows only, dense Adam's")
            assert "sharded over 2 ranks" in line
            assert "users (the loss reads all of it, as L2 does; Adam with weight_decay=2" in line
            assert "more (something reads all of it)" in line
        for case in ("late", "reads"):
            assert "is read whole, or between steps" in found[case], case
        assert "is read whole, or between steps" in found["read later"]
        assert "sharded tables need world.strategy=ddp, not local_sgd" in found["local"]
        assert "items has scale_grad_by_freq, which would count ids" in found["counted"]
        assert found["stopped alike"]
        assert found["own loop"]
        assert found["tried"]
        assert found["untouched"]
        wanted = ("LostRank: ", "NumbersError: ")[rank]
        assert found["nan"].startswith(wanted)
        assert rank == 0 or "sample 31" in found["nan"]
        wanted = ("LostRank: ", "DataError: id 9000 is not in 0..8999")[rank]
        assert found["id"].startswith(wanted)
