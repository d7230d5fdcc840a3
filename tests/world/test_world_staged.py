"""Ranks that have some layers of the model each: the results of one rank, and its checkpoints."""

import json
import shutil

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close
from world_ranks import run

SCRIPT = """
    import json
    import os
    import signal
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.errors import NumbersError
    from flatout.world import LostRank, place

    torch.set_num_threads(1)
    folder, phase = Path(sys.argv[1]), sys.argv[3]
    rank, ranks = place().rank, place().world_size
    copies = dict(stages=2) if phase == "four" else {}
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(121, 8, generator=draw)
    y = 2 * x[:, :1] + 0.1 * torch.randn(121, 1, generator=draw)


    class Block(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm(16)
            self.up, self.down = nn.Linear(16, 33), nn.Linear(33, 16)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            return x + self.down(self.relu(self.up(self.norm(x))))


    class Net(nn.Module):
        def __init__(self, norm=nn.LayerNorm):
            super().__init__()
            self.first, self.twin = nn.Linear(8, 16), nn.Linear(8, 16)
            self.twin.weight = self.first.weight  # on one rank, both
            self.blocks = nn.ModuleList(Block(norm) for _ in range(3))
            self.scale = nn.Parameter(torch.ones(1))
            self.spare = nn.Parameter(torch.ones(5))  # no loss reaches it
            self.last = nn.Linear(16, 1)

        def forward(self, x):
            first = self.first(x) + self.twin(x * x)
            x = first
            for block in self.blocks:
                x = block(x)
            return self.last(x + first) * self.scale  # past all stages


    def grouped(net):
        return [
            {"params": list(net.blocks.parameters()), "lr": 0.002},
            {"params": [net.scale, *net.first.parameters(), *net.last.parameters()]},
            {"params": [net.spare, net.twin.bias], "weight_decay": 0.5},
        ]


    KINDS = {
        "sgd": lambda net: torch.optim.SGD(net.parameters(), 0.001, momentum=0.9),
        "adam": lambda net: torch.optim.Adam(net.parameters(), 0.003),
        "adamw": lambda net: torch.optim.AdamW(grouped(net), 0.003, weight_decay=0.1),
    }


    class Ends(flatout.Callback):
        every = 1

        def on_step(self, state):
            if state.step == 9 and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGTERM)


    class Saves(flatout.Callback):
        def on_epoch_end(self, state):
            state.trainer.save(folder / f"saved{ranks}.safetensors")


    def fit(
        name, strategy="staged", epochs=3, run=None, norm=nn.LayerNorm, kind="adam", x=x,
        again=False, frozen=0, **given,
    ):
        torch.manual_seed(0)
        net = Net(norm)
        for module in (net.first, net.twin, *net.blocks)[:frozen]:
            module.requires_grad_(False)
        recipe = given.pop("recipe", {})
        recipe["world"] = dict(strategy=strategy, **copies, **recipe.get("world", {}))
        said = []
        trainer = flatout.Trainer(
            net, loss="mse", optimizer=KINDS[kind](net), allow="exact",
            metrics=["mae"], run=None if run is None else str(run), recipe=flatout.Recipe(**recipe),
            say=said.append, **given.pop("trainer", {}),
        )
        history = trainer.fit(
            (x, y), batch_size=24, epochs=epochs, validation_data=(x, y), shuffle=False,
            progress=False, resume=run is not None and run.exists(), **given,
        )
        logs = {k: v for k, v in history.epochs[-1].items() if k != "seconds"}
        shape = [(n, list(p.shape), type(p).__name__) for n, p in net.named_parameters()]
        if again:  # the optimizer goes on with its state
            history = trainer.fit((x, y), batch_size=24, epochs=1, shuffle=False, progress=False)
        predicted = trainer.predict(x[:7])
        rounding = 0.1 if name == "bf16" else 1e-5
        found = net.eval()(x[:7])
        assert torch.allclose(predicted, found, atol=rounding), (name, predicted, found)
        return {
            "logs": logs, "shape": shape, "said": said, "notes": history.notes,
            "weights": sum([p.double().flatten().tolist() for p in net.state_dict().values()], []),
            "trained": sum([p.double().flatten().tolist() for p in net.parameters()], []),
            "reasons": {k: c.reason for k, c in history.recipe.choices.items()},
        }


    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.gru = nn.GRU(16, 16, batch_first=True)
            self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 1)

        def forward(self, ids, mask):
            x, _ = self.gru(self.layer(self.table(ids) * mask.unsqueeze(2)))
            x = x.mean(1)
            return {"a": self.a(x), "b": self.b(x)}


    class Thaws(flatout.Callback):
        def on_epoch_end(self, state):
            state.model.table.requires_grad_(True)


    def several(strategy):
        # Inputs and outputs by name; labels of which some are ignored, in one batch all.
        torch.manual_seed(0)
        net = Two()
        net.table.requires_grad_(False)
        inputs = {"ids": torch.randint(0, 20, (101, 6)), "mask": torch.rand(101, 6)}
        labels = torch.randint(0, 4, (101,))
        labels[48:72] = labels[3] = -100
        targets = {"a": labels, "b": torch.randn(101, 1)}
        trainer = flatout.Trainer(
            net, loss={"a": "cross_entropy", "b": "mse"}, metrics={"a": ["accuracy"]},
            optimizer=torch.optim.SGD(net.parameters(), 0.1), allow="exact",
            recipe=flatout.Recipe(world=dict(strategy=strategy, **copies)),
            say=lambda line: None,
        )
        history = trainer.fit(
            (inputs, targets), batch_size=24, epochs=2, shuffle=False, progress=False,
            validation_data=(inputs, targets), callbacks=[Thaws()],
        )
        return {
            "logs": {k: v for k, v in history.epochs[0].items() if k != "seconds"}, "shape": [],
            "weights": sum([p.double().flatten().tolist() for p in net.parameters()], []),
        }


    def exact(strategy, few=False):
        one = {"strategy": strategy}
        # One rank takes statistics over as many samples.
        norms = dict(memory=dict(micro_batch=3))
        if strategy == "staged":
            norms = dict(world=dict(batch_statistics="per_micro_batch", micro_batches=8))
        world = dict(schedule="gpipe", micro_batches=5)
        found = {
            "sgd": fit("sgd", **one, kind="sgd", again=True, callbacks=[Saves()]),
            "adamw": fit(
                "adamw", **one, kind="adamw", trainer=dict(clip_norm=0.5, accumulate=2),
                recipe=dict(world=world),
            ),
        }
        return found if few else {
            **found,
            "norm": fit(
                "norm", **one, norm=nn.BatchNorm1d, drop_last=True, trainer=dict(clip_value=0.01),
                recipe=norms, epochs=2,
            ),
            "several": several(strategy),
            "frozen": fit(
                "frozen", **one, frozen=3, epochs=2, trainer=dict(clip_norm=0.05),
            ),
            "bf16": fit("bf16", **one, recipe=dict(compute=dict(precision="bf16")), epochs=2),
            "fused": fit(
                "fused", **one, recipe=dict(compute=dict(fused_optimizer="on")),
                callbacks=[flatout.EarlyStopping(patience=1, min_delta=100.0)],
            ),
        }


    found = {}
    if phase == "one":
        found = exact("ddp")
        found["whole"] = fit("whole", "ddp", 4)
        for name in ("written", "pieces"):
            found[f"{name} on 1"] = fit(name, "ddp", 4, folder / f"{name} for 1")
    elif phase == "two":
        found = exact("staged")
        fit("written", "staged", 2, folder / "written")
        fit("pieces", "staged", 2, folder / "pieces", recipe=dict(save=dict(pieces="per_rank")))
        fit("ddp", "ddp", 2, folder / "ddp")
        try:
            fit("stopped", "staged", 4, folder / "stopped", callbacks=[Ends()])
        except SystemExit as error:
            found["stopped"] = [error.code, sorted(os.listdir(folder / "stopped" / "checkpoints"))]
        found["resumed"] = fit("stopped", "staged", 4, folder / "stopped", callbacks=[Ends()])
        spoiled = x.clone()
        spoiled[100] = float("nan")
        try:
            fit("spoiled", x=spoiled)
        except (NumbersError, LostRank) as error:
            found["spoiled"] = str(error)
        try:
            fit("overflowing", x=x * 1e25)
        except (NumbersError, LostRank) as error:
            found["overflowing"] = str(error)
    elif phase == "four":  # two copies of two stages
        found = exact("staged", few=True)
        found["norm"] = fit(
            "norm", norm=nn.BatchNorm1d, drop_last=True, trainer=dict(clip_value=0.01), epochs=2,
            recipe=dict(world=dict(batch_statistics="per_micro_batch", micro_batches=4)),
        )
        found["several"] = several("staged")
        try:
            fit("stopped", "staged", 4, folder / "copies stopped", callbacks=[Ends()])
        except SystemExit as error:
            found["stopped"] = error.code
        resumed = fit("stopped", "staged", 4, folder / "copies stopped", callbacks=[Ends()])
        found["resumed"] = resumed
        spoiled = x.clone()
        spoiled[100] = float("nan")
        try:
            fit("spoiled", x=spoiled)
        except (NumbersError, LostRank) as error:
            found["spoiled"] = str(error)
    else:
        found = exact("staged", few=True)
        found["written on 3"] = fit("written", "fsdp", 4, folder / "written for 3")
        found["ddp on 3"] = fit("ddp", "staged", 4, folder / "ddp for 3")
    (folder / f"{phase}{rank}.json").write_text(json.dumps(found))
"""


def close(found, wanted, bound=1e-5):
    assert found["weights"] == pytest.approx(wanted["weights"], abs=bound)
    for name, value in wanted["logs"].items():
        assert found["logs"][name] == pytest.approx(value, rel=10 * bound, abs=bound)
    assert found["shape"] == wanted["shape"]


@pytest.mark.slow
def test_stages_on_ranks_give_what_one_rank_gives_and_its_checkpoints(tmp_path):
    run(SCRIPT, 2, tmp_path, "two")
    for name, ranks in (("written", 1), ("pieces", 1), ("written", 3), ("ddp", 3)):
        shutil.copytree(tmp_path / name, tmp_path / f"{name} for {ranks}")
    run(SCRIPT, 3, tmp_path, "three")
    run(SCRIPT, 1, tmp_path, "one")
    run(SCRIPT, 4, tmp_path, "four")
    two, three, four, one = (
        [json.loads((tmp_path / f"{phase}{rank}.json").read_text()) for rank in range(ranks)]
        for phase, ranks in (("two", 2), ("three", 3), ("four", 4), ("one", 1))
    )
    saved = [load_file(tmp_path / f"saved{ranks}.safetensors") for ranks in (1, 2, 3, 4)]
    for found in saved[1:]:
        assert_close(found, saved[0], atol=1e-5, rtol=1e-5)
    for ranks in (two, three, four):
        assert all(other["sgd"]["weights"] == ranks[0]["sgd"]["weights"] for other in ranks)
        for name in ranks[0].keys() & {"sgd", "adamw", "norm", "several", "frozen", "fused"}:
            if (name, ranks) != ("norm", four):
                close(ranks[0][name], one[0][name])
    # Each copy moves statistics by its own samples; all evaluate with their mean.
    assert four[0]["norm"]["trained"] == pytest.approx(one[0]["norm"]["trained"], abs=1e-5)
    assert all(other["norm"]["weights"] == four[0]["norm"]["weights"] for other in four)
    close(two[0]["bf16"], one[0]["bf16"], 0.02)
    whole = one[0]["whole"]
    for found in (one[0]["written on 1"], one[0]["pieces on 1"], two[0]["resumed"]):
        close(found, whole)
    for found in (three[0]["written on 3"], three[0]["ddp on 3"], four[0]["resumed"]):
        close(found, whole)
    assert all(rank["stopped"] == 143 for rank in four)
    assert "NaN or infinity in sample 100" in four[0]["spoiled"]
    # A signal to the last rank stops all, behind a checkpoint.
    checkpoints = ["step-000000006", "step-000000010"]
    assert two[0]["stopped"] == two[1]["stopped"] == [143, checkpoints]
    # A bad sample holds back the step of all, and one rank names it.
    assert "NaN or infinity in sample 100" in two[0]["spoiled"]
    assert "step 5 is not finite by the part of rank 0" in two[1]["spoiled"]
    # Of a model's own numbers the first stage that has them tells.
    assert "first bad value" in two[0]["overflowing"]
    said = next(line for line in two[0]["sgd"]["said"] if line.startswith("2 ranks"))
    assert "CPU, staged: first" in said
    assert "8 micro-batches, bubble 11%, global batch 24" in said
    assert any("staged in 2 x 2 copies: first" in line for line in four[0]["sgd"]["notes"])
    assert "staged" in two[0]["sgd"]["reasons"]["compute.rewrites"]


COMBINED = """
    import json

    import torch
    from torch import nn

    import flatout
    from flatout.errors import DataError
    from flatout.world import place

    torch.set_num_threads(1)
    rank, ranks = place().rank, place().world_size


    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 16, padding_idx=0)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.block = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(16, 3)

        def forward(self, ids):
            padding = ids == 0
            found = self.block(self.embed(ids), src_key_padding_mask=padding)
            kept = (~padding).unsqueeze(-1).to(found.dtype)
            return self.head((found * kept).sum(1) / kept.sum(1))


    def fit(net, x, y, valid, compute=None, **given):
        world = {"strategy": "staged", **given} if ranks > 1 else {}
        trainer = flatout.Trainer(
            net, loss="cross_entropy", optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
            allow="exact", say=lambda line: None,
            recipe=flatout.Recipe(compute=compute or {}, world=world),
        )
        history = trainer.fit(
            (x, y), batch_size=8, epochs=1, progress=False,
            validation_data=flatout.data.arrays(*valid).batch(4),
        )
        last = history.epochs[-1]
        return last["loss"], last["val_loss"], trainer.evaluate(valid)["loss"]


    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 20, (33, 9), generator=draw)
    ids[::3, 5:] = 0
    kinds = torch.randint(0, 3, (33,), generator=draw)
    found = {}
    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        compute = {"precision": precision}
        found[precision] = fit(Padded(), ids, kinds, (ids[:21], kinds[:21]), compute)
    if ranks > 1:
        x = torch.randn(34, 6, generator=draw)
        own = {"batch_statistics": "per_micro_batch"}
        for name, rows in (("normed", 34), ("one left", 33)):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
            y = (x[:, 0] > 0).long()
            try:
                found[name] = fit(net, x[:rows], y[:rows], (x, y), **own)
            except DataError as error:
                found[name] = str(error)
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_padded_attention_in_bf16_and_small_micro_batches(tmp_path):
    one, *two = [json.loads(run(COMBINED, n, tmp_path)[-1][0]) for n in (1, 2)]
    [two] = two
    assert two["fp32"] == pytest.approx(one["fp32"], rel=1e-5)
    loss, within, after = two["bf16"]
    assert [loss, within, after] == pytest.approx(one["fp32"], rel=0.02)
    assert within == pytest.approx(after, rel=0.005)
    assert two["normed"][1] == pytest.approx(two["normed"][2], rel=1e-5)
    assert "one sample" in two["one left"]
