"""Models whose tables follow the ids of their data from day to day."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from train_clicks import Clicks, Stop, batches, day_ids, schema, trainer, write_day
from train_jobs import same

import flatout
from flatout.data import Ids
from flatout.data.reading.schema import Column
from flatout.errors import CheckpointError, DataError
from flatout.recipe import Recipe, Save
from flatout.save.export import export
from flatout.train.callbacks import BestCheckpoint

WEEK = Path(__file__).with_name("scripts_killed_week.py")

pytestmark = pytest.mark.usefixtures("one_thread")


def fit(job, path, stated=None, epochs=1, **more):
    train, held_out = batches(path, stated)
    return job.fit(train, validation_data=held_out, epochs=epochs, progress=False, **more)


@pytest.fixture
def days(tmp_path):
    """Three days, and a finished fit of the first in the folder `one`."""
    paths = [write_day(tmp_path, day) for day in range(3)]
    job = trainer(run=tmp_path / "one")
    fit(job, paths[0], callbacks=[BestCheckpoint("val_loss")])
    return paths, job, tmp_path


def rows_of(job, ids):
    ids = np.ascontiguousarray(ids)
    out = np.empty_like(ids)
    assert job.signature.ids.maps["ids"].rows_of(ids, out) == -1
    return torch.from_numpy(out)


def test_a_day_is_the_plain_job_on_its_rows(days):
    paths, job, _ = days
    kept = len(day_ids(0)) * 3 // 4
    distinct = np.unique(day_ids(0)[:kept])
    assert job.signature.ids.maps["ids"].size == len(distinct) + 2
    rows = rows_of(job, day_ids(0))
    labels = torch.tensor([float(line[0]) for line in paths[0].read_text().splitlines()])
    torch.manual_seed(0)
    model = Clicks()
    plain = trainer(model)
    train = flatout.data.arrays((rows[:kept], torch.ones(kept, 4)), labels[:kept])
    plain.fit(train.shuffle(seed=1).batch(32), epochs=1, progress=False)
    # Larger than the ids need: no row was added, and none is another.
    assert same(model, job.model)


def test_the_next_day_keeps_rows_and_state_by_id(days):
    paths, job, folder = days
    said = []
    next_day = trainer(Clicks(rows=5), warm_start=folder / "one", say=said.append)
    before = day_ids(0)[:180].reshape(-1)
    old_rows = rows_of(job, before)
    old = [job.model.factors.weight[old_rows].clone(), job.model.linear.weight[old_rows].clone()]
    moments = job.optimizer.state[job.model.factors.weight]["exp_avg"][old_rows].clone()
    train, held_out = batches(paths[1])
    next_day.loop.world  # noqa: B018
    next_day.learn(train, held_out)
    ids = next_day.signature.ids.maps["ids"]
    new = set(day_ids(1)[:180].reshape(-1)) - set(before)
    assert [line for line in said if line.startswith("ids:")] == [
        f"ids: {len(new)} new ids -> new rows; {ids.size:,} rows"
    ]
    now = rows_of(next_day, before)
    assert torch.equal(next_day.model.factors.weight[now], old[0])
    assert torch.equal(next_day.model.linear.weight[now], old[1])
    state = next_day.optimizer.state[next_day.model.factors.weight]
    assert torch.equal(state["exp_avg"][now], moments)
    fresh = rows_of(next_day, np.array(sorted(new)))
    assert not state["exp_avg"][fresh].any()
    assert not next_day.model.linear.weight[fresh].any()  # zeros, as the table was built
    assert next_day.model.factors.num_embeddings == len(next_day.model.factors.weight) == ids.size
    drawn = next_day.model.factors.weight[fresh]
    assert 0.05 < drawn.std() < 2
    fit(next_day, paths[1])  # and it trains


@pytest.mark.parametrize("touched", ["off", "on"])
def test_two_days_in_one_trainer_or_by_a_warm_start(days, touched):
    paths, _, folder = days
    recipe = Recipe().replace({"compute.touched_rows": touched})
    here = trainer(recipe=recipe)
    fit(here, paths[0])
    fit(here, paths[1])
    first = trainer(recipe=recipe, run=folder / "first")
    fit(first, paths[0])
    second = trainer(recipe=recipe, warm_start=folder / "first")
    fit(second, paths[1])
    assert same(here.model, second.model)
    assert here.signature.ids.maps["ids"].digest == second.signature.ids.maps["ids"].digest
    fit(here, paths[1])  # the same data once more are not counted again
    assert here.signature.ids.maps["ids"].trainings == 2


def test_what_the_old_model_gives_is_told_before(days):
    paths, job, folder = days
    held_out = batches(paths[1])[1]
    expected = job.evaluate(held_out)
    said = []
    next_day = trainer(Clicks(rows=5), warm_start=folder / "one", say=said.append)
    history = fit(next_day, paths[1])
    auc, loss = expected["auc"], expected["loss"]
    (before,) = [line for line in said if line.startswith("before training")]
    assert before == f"before training: val auc {auc:.4g}, loss {loss:.4g}"
    after = history.epochs[-1]
    assert said[-1] == history.notes[-1]
    assert said[-1] == (
        f"val auc {after['val_auc']:.4g} (before training, same rows: {auc:.4g}), "
        f"loss {after['val_loss']:.4g} (before training, same rows: {loss:.4g})"
    )


def test_forgotten_ids_lose_their_rows(days):
    paths, _, folder = days
    stated = schema(Ids(forget=1))
    next_day = trainer(Clicks(rows=5), warm_start=folder / "one")
    size = next_day.signature.ids.maps["ids"].size
    fit(next_day, paths[1], stated)
    after = next_day.signature.ids.maps["ids"]
    assert set(after.items.ids) == set(day_ids(1)[:180].reshape(-1))
    assert after.size < size + len(set(day_ids(1)[:180].reshape(-1)) - set(day_ids(0).reshape(-1)))
    gone = np.setdiff1d(day_ids(0)[:180], day_ids(1)[:180])
    assert (rows_of(next_day, gone) == 1).all()


def test_served_with_torch_and_safetensors_alone(days, tmp_path):
    paths, job, _ = days
    from safetensors import safe_open
    from safetensors.torch import load_file

    job.save(tmp_path / "day.safetensors")
    expected = job.predict(batches(paths[1])[1])

    model = Clicks(rows=len(job.model.factors.weight))
    model.load_state_dict(load_file(tmp_path / "day.safetensors"))
    with safe_open(tmp_path / "day.ids.safetensors", "pt") as file:
        told = json.loads(file.metadata()["ids"])["columns"]["ids"]
        known, rows = file.get_tensor("ids.ids"), file.get_tensor("ids.rows")
    own = rows >= 0
    known, rows = known[own], rows[own]
    ids = torch.from_numpy(day_ids(1)[180:])
    at = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    unknown = told["firsts"][0]
    found = torch.where(known[at] == ids, rows[at], unknown)
    with torch.no_grad():
        assert torch.equal(model(found, torch.ones(60, 4)), expected)


def test_the_file_beside_comes_back(days, tmp_path):
    paths, job, _ = days
    path = job.save(tmp_path / "day.pt")
    other = trainer(Clicks(rows=5))
    other.load(path)
    held_out = batches(paths[1])[1]
    assert other.evaluate(held_out) == job.evaluate(held_out)
    warm = trainer(Clicks(rows=5), warm_start=path)
    fit(warm, paths[1])
    assert warm.signature.ids.maps["ids"].trainings == 2
    warm.save(tmp_path / "next.pt")
    beside = tmp_path / "day.ids.safetensors"
    beside.write_bytes((tmp_path / "next.ids.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="map of ids is of another model"):
        trainer(Clicks(rows=5)).load(tmp_path / "day.pt")
    beside.unlink()
    with pytest.raises(CheckpointError, match=r"which was not found") as error:
        trainer(Clicks(rows=len(job.model.factors.weight))).load(path)
    assert "in the folder of the model" in error.value.do


def test_exported_from_a_run(days, tmp_path):
    paths, job, folder = days
    for source, target in ((folder / "one", "plain"), (tmp_path / "plain.safetensors", "again")):
        export(source, tmp_path / f"{target}.safetensors")
        other = trainer(Clicks(rows=5))
        other.load(tmp_path / f"{target}.safetensors")
        held_out = batches(paths[1])[1]
        assert other.evaluate(held_out) == job.evaluate(held_out)
    job.load_best()
    assert job.signature.ids is not None


def test_the_map_of_another_model(days):
    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(9, 2)

    with pytest.raises(CheckpointError, match="another model: it has rows of the table 'factors'"):
        trainer(Other(), warm_start=days[2] / "one")


def test_a_schema_that_lacks_the_field(days):
    paths, job, folder = days
    next_day = trainer(Clicks(rows=5), warm_start=folder / "one")
    table = flatout.data.table(
        {"site": np.arange(8), "clicks": np.zeros(8, np.float32)}, target="clicks"
    )
    with pytest.raises(DataError, match="maps the ids of column 'ids', and these data have no"):
        next_day.fit(table.batch(4), progress=False)
    with pytest.raises(DataError, match="these data have no columns"):
        job.predict((torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4)))
    with pytest.raises(DataError, match="learned none yet"):
        trainer().evaluate(batches(paths[1])[1])


def test_ids_that_are_all_hashed_go_from_day_to_day(tmp_path):
    paths = [write_day(tmp_path, day) for day in range(2)]
    stated = schema(Ids(vocabulary="none", buckets=50))
    job = trainer(Clicks(rows=5), run=tmp_path / "one")
    fit(job, paths[0], stated)
    held_out = batches(paths[1], stated)[1]
    expected = job.evaluate(held_out)
    loaded = trainer(Clicks(rows=5))
    loaded.load(job.save(tmp_path / "day.safetensors"))
    assert loaded.evaluate(held_out) == expected
    next_day = trainer(Clicks(rows=9), warm_start=tmp_path / "one")
    assert next_day.evaluate(held_out) == expected
    fit(next_day, paths[1], stated)
    assert len(next_day.model.factors.weight) == 51


class Before(torch.nn.Module):
    """An item and those before it, of one table."""

    def __init__(self):
        super().__init__()
        self.items, self.out = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 1)

    def forward(self, item, before):
        return self.out(self.items(item) * self.items(before).sum(1))[:, 0]


def items_of_day(day, **ids):
    draw = np.random.default_rng(day)
    before = draw.integers(10 * day, 30 + 10 * day, (80, 3)) * 10**12
    item = before[:, 0] + 10**12
    rows = {"item": item, "before": list(before), "clicked": (item % 7 > 3).astype(np.float32)}
    stated = flatout.data.table(rows, target="clicked").schema.with_ids(**ids)
    return rows, flatout.data.table(rows, schema=stated).batch(8)


def test_columns_that_one_table_reads_have_the_same_rows(tmp_path):
    seen, last = set(), None
    for day in range(2):
        rows, batches_of_day = items_of_day(day, item=Ids(), before=Ids())
        said = []
        job = trainer(
            Before(), metrics=[], run=tmp_path / str(day), warm_start=last, say=said.append
        )
        job.fit(batches_of_day, progress=False)
        new = {*rows["item"].tolist(), *np.stack(rows["before"]).flat} - seen
        seen |= new
        (line,) = [line for line in said if line.startswith("item, before: ")]
        assert line == f"item, before: {len(new)} new ids -> new rows; {len(seen) + 2} rows"
        assert len(job.model.items.weight) == len(seen) + 2
        maps = job.signature.ids.maps.values()
        items = [(one.items.ids.tolist(), one.items.numbers.tolist()) for one in maps]
        own = [dict(zip(*pair, strict=True)) for pair in items]
        assert own[0] == own[1]
        assert own[0].keys() == seen
        last = tmp_path / str(day)
    _, other = items_of_day(0, item=Ids(), before=Ids(admit=2))
    with pytest.raises(DataError, match=r"one table .* columns 'item' and 'before'"):
        trainer(Before(), metrics=[]).fit(other, progress=False)


def test_tables_beyond_memory_are_refused_before(days, monkeypatch):
    from flatout.train import grow_tables

    paths, _, folder = days
    job = trainer(Clicks(rows=5), warm_start=folder / "one")
    before = copy.deepcopy(job.model)
    monkeypatch.setattr(grow_tables, "available_bytes", lambda: 2000)
    with pytest.raises(DataError, match=r"linear \d+ rows of 4 bytes.*2\.0 kB are free") as error:
        fit(job, paths[1])
    assert "most = N" in error.value.do
    assert same(before, job.model)
    with pytest.raises(DataError, match=r"factors 1,099,511,627,777 rows .*that ids share"):
        fit(job, paths[1], schema(Ids(buckets=2**40)))


def test_columns_of_a_table_are_each_mapped(tmp_path):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.site, self.ad = torch.nn.Embedding(1, 4), torch.nn.EmbeddingBag(1, 4, mode="sum")
            self.sites_again = torch.nn.Embedding(1, 4)
            self.sites_again.weight = self.site.weight
            self.out = torch.nn.Linear(4, 1)

        def forward(self, site, ad):
            both = self.site(site) + self.ad(ad[:, None]) + self.sites_again(site.flip(0)).flip(0)
            return self.out(both)[:, 0]

    draw = np.random.default_rng(0)
    rows = {"site": draw.integers(-5, 5, 40), "ad": draw.integers(0, 10**15, 40)}
    rows["clicked"] = (rows["site"] > 0).astype(np.float32)
    source = flatout.data.table(rows, target="clicked")
    stated = source.schema.with_ids(site=Ids(), ad=Ids(vocabulary="none", buckets=7))
    assert isinstance(stated["site"], Column)
    job = trainer(Two(), metrics=[])
    job.fit(flatout.data.table(rows, schema=stated).batch(8), epochs=2, progress=False)
    assert (job.model.site.num_embeddings, job.model.sites_again.num_embeddings) == (12, 12)
    assert job.model.site.weight is job.model.sites_again.weight
    assert len(job.model.ad.weight) == 8


def test_ragged_rows_are_padded_with_the_row_of_no_id(tmp_path):
    class Bag(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(300, 4, padding_idx=0)
            self.out = torch.nn.Linear(4, 1)

        def forward(self, ids, values):
            return self.out((self.table(ids) * values[..., None]).sum(1))[:, 0]

    draw = np.random.default_rng(0)
    rows = [np.sort(draw.choice(500, draw.integers(1, 6), replace=False)) + 1 for _ in range(90)]
    lines = [f"{len(row) % 2} " + " ".join(f"{id}:1" for id in row) for row in rows]
    (tmp_path / "day.svm").write_text("\n".join(lines) + "\n")
    source = flatout.data.libsvm(tmp_path / "day.svm", layout="ragged", base=0)
    stated = source.schema.with_ids(ids=Ids(admit=2))
    job = trainer(Bag())
    source = flatout.data.libsvm(tmp_path / "day.svm", schema=stated)
    job.fit(source.batch(16), progress=False)
    counts = np.unique(np.concatenate(rows), return_counts=True)[1]
    assert job.signature.ids.tables == {"table": "ids"}
    assert job.signature.ids.maps["ids"].size == 2 + (counts >= 2).sum()
    assert not job.model.table.weight[0].any()


def test_the_same_weights_from_every_format(days, tmp_path):
    """Ids as they are go into converted files, and what the schema states of them."""
    paths, job, _ = days
    source = flatout.data.libsvm(paths[0], schema=schema())
    for to in ("tfrecord", "parquet", "rows"):
        folder = tmp_path / to
        flatout.data.convert(source, folder / f"day.{to}", progress=False)
        if to == "rows":
            converted = flatout.data.rows(folder / "day.rows")
        else:
            stated = folder / f"_day.{to}.toml"
            files = str(folder / f"*.{to}")
            converted = getattr(flatout.data, to)(files, schema=stated)
        train, held_out = converted.split(0.75, by="order")
        other = trainer()
        batches_of_day = train.shuffle(seed=1).batch(32)
        other.fit(batches_of_day, validation_data=held_out.batch(64), progress=False)
        assert same(other.model, job.model)
        assert batches_of_day.explanation().stages  # that ran with rows in place of ids


def test_a_resume_in_the_middle_of_a_day_is_bitwise(days):
    paths, _, folder = days
    given = {"warm_start": folder / "one", "recipe": Recipe(save=Save(every=3))}
    whole = trainer(Clicks(rows=5), run=folder / "whole", **given)
    fit(whole, paths[1], epochs=2, callbacks=[Stop(0)])
    cut = trainer(Clicks(rows=7), run=folder / "cut", **given)
    with pytest.raises(RuntimeError, match="crash"):
        fit(cut, paths[1], epochs=2, callbacks=[Stop(4)])
    said = []
    again = trainer(Clicks(rows=9), run=folder / "cut", say=said.append, **given)
    fit(again, paths[1], epochs=2, resume=True, callbacks=[Stop(0)])
    assert any(line.startswith("resumed step 3") for line in said)
    assert not any(line.startswith("before training") for line in said)
    assert same(again.model, whole.model)
    assert again.signature.ids.digest == whole.signature.ids.digest


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[], ["compute.touched_rows=on"]], ids=["dense", "touched"])
def test_a_week_that_was_killed_is_the_undisturbed_week(tmp_path, settings):
    done = subprocess.run(
        [sys.executable, WEEK, tmp_path, "14", "3", *settings],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert sum(result["killed"]) >= 7
    assert result["rows"][0] > 100
    assert result["rows"][2] == 7  # trainings
