"""What frozen layers give is kept: the same to rounding, and only where it is a sample's own."""

import copy
import io
import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, dataloader

from flatout.cache_folder import cache_folder
from flatout.cures import cut_features, record
from flatout.cures.dataset_now import Dataset, DatasetNow
from flatout.cures.features import keep_features, keep_whole
from flatout.cures.kept_samples import FIELD, Keeping
from flatout.data import sample_names
from flatout.data.features import files
from flatout.data.features.key import hashed
from flatout.train.parts.features.choice import Choice


@pytest.fixture(autouse=True)
def _begun():
    record.begin({FIELD: "memory"})


def keeping(where="memory", **limits):
    return Keeping(where, DatasetNow(), **{"checked": 0, "unproven": 1.0, **limits})


class Counted(nn.Module):
    """Layers that count how often they are computed."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


class Job:
    """A head on frozen layers, called as cures call it."""

    def __init__(self, *layers, where="memory", **limits):
        torch.manual_seed(0)
        self.body = Counted(*(layers or (nn.Linear(6, 5), nn.ReLU())))
        self.body.requires_grad_(False).eval()
        self.model = nn.Sequential(self.body, nn.Linear(5, 2))
        kept = keeping(where, **limits)
        self.now = kept.now
        self.call = keep_features(kept, self.model, (), {}, nn.Module.__call__)
        cells = [cell.cell_contents for cell in self.call.__closure__]
        self.parts = next(found for found in cells if isinstance(found, list))

    @property
    def features(self):
        """Of the body, which sets an attribute in forward, so that the model is not cut."""
        (one,) = self.parts
        return one

    def __call__(self, x):
        return self.call(self.model, x)

    def computes(self, x):
        """Whether the frozen layers are computed for this batch; what comes is right either way."""
        before = self.body.calls
        given = self(x)
        computed = self.body.calls > before
        torch.testing.assert_close(given, self.model(x), rtol=1e-5, atol=1e-6)
        return computed


X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))


def told():
    return dict(record.left()).get(FIELD)


def test_a_sample_is_computed_once_in_whatever_batch_it_comes():
    job = Job()
    assert job.computes(X[:8])
    assert not job.computes(X[:8])
    assert not job.computes(X[[7, 0, 3, 3]])
    assert job.computes(X[4:])
    assert not job.computes(X.flip(0))
    assert dict(record.applied())[FIELD] == "features of frozen layers of Sequential in memory"
    assert told() is None


def test_gradients_are_those_without():
    job, plain = Job(), Job()
    for _ in range(2):
        for some in (job, plain):
            some.model.zero_grad()
            (some(X) if some is job else some.model(X)).square().sum().backward()
        assert torch.equal(job.model[1].weight.grad, plain.model[1].weight.grad)
    assert job.body.calls == 1


def test_the_first_batches_are_computed_as_well():
    job = Job(checked=2)
    assert [job.computes(X) for _ in range(5)] == [True, True, True, False, False]


class Centerd(nn.Module):
    """What it gives for a sample depends on the others."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return (x - x.mean(0)) * self.weight


def test_layers_for_which_samples_depend_on_one_another_are_left_alone():
    job = Job(nn.Linear(6, 5), Centerd(), checked=2)
    assert job.computes(X)
    assert job.computes(X[:5])
    assert "depends on the rest of its batch" in told()
    assert [job.computes(X) for _ in range(3)] == [True] * 3


def test_numbers_that_are_none_are_left_alone():
    job = Job(checked=1)
    bad = X.clone()
    bad[0, 0] = torch.nan
    assert job.body(bad).isnan().any()
    job(bad)
    job(bad)
    assert told() is not None


def change_weights(job):
    with torch.no_grad():
        job.body.layers[0].weight.mul_(2)


def change_uncounted(job):
    job.body.layers[0].weight.data.mul_(2)


def replace_weights(job):
    job.body.layers[0].bias = nn.Parameter(torch.ones(5), requires_grad=False)


def load(job):
    state = {name: value + 1 for name, value in job.body.state_dict().items()}
    job.body.load_state_dict(state)


@pytest.mark.parametrize("change", [change_weights, change_uncounted, replace_weights, load])
def test_other_weights_give_other_features(change):
    job = Job()
    job.computes(X)
    change(job)
    job.features._contents.next_look = 0.0
    assert job.computes(X)
    assert not job.computes(X)


def test_layers_whose_weights_change_in_each_step_are_left_alone():
    job = Job()
    for _ in range(5):
        change_weights(job)
        assert job.computes(X)
    assert told() == "the weights of Counted change while it trains"


def test_layers_that_are_trained_from_some_epoch_on_are_computed():
    job = Job()
    job.computes(X)
    job.body.requires_grad_(True)
    assert job.computes(X)
    job(X).sum().backward()
    assert job.body.layers[0].weight.grad is not None


def test_dropout_that_is_put_into_train_mode_draws():
    job = Job(nn.Linear(6, 5), nn.Dropout(0.5))
    job.computes(X)
    job.body.train()
    assert not torch.equal(job(X), job(X))


def test_under_autocast_they_are_others():
    job = Job()
    job.computes(X)
    with torch.autocast("cpu", torch.bfloat16):
        before = job.body.calls
        job(X)
        assert job.body.calls == before + 1
        assert job(X).dtype is torch.bfloat16
        assert job.body.calls == before + 1


def test_what_is_kept_in_inference_mode_can_be_trained_on():
    job = Job()
    job(X[:2])
    with torch.inference_mode():
        job(X)
        assert not job(X).requires_grad
    job(X).sum().backward()
    assert job.body.calls == 2
    assert job.model[1].weight.grad is not None


def test_what_follows_may_write_into_it():
    job = Job()
    job.model[1] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 2))
    job.computes(X)
    first = job(X)
    assert torch.equal(job(X), first)


@pytest.mark.parametrize(
    "batch",
    [
        X.clone().requires_grad_(),
        torch.ones(6),
        torch.ones(0, 6),
        nn.Parameter(X.clone(), requires_grad=False),
    ],
)
def test_other_inputs_are_computed(batch):
    job = Job()
    for _ in range(3):
        before = job.body.calls
        job(batch)
        assert job.body.calls == before + 1


def test_a_full_memory_keeps_what_it_has(monkeypatch):
    monkeypatch.setattr(files, "available_bytes", lambda: (512 << 20) + 6 * 24)
    job = Job()
    assert job.computes(X[:4])
    assert not job.computes(X[:4])
    assert job.computes(X[4:8])
    assert told() == "memory has no room for more than 6 rows; the others are computed each time"
    assert not job.computes(X[:6])
    assert job.computes(X[:7])


def test_samples_of_which_none_comes_again_are_forgotten(monkeypatch):
    monkeypatch.setattr(files, "available_bytes", lambda: (512 << 20) + 6 * 24)
    job = Job()
    assert job.computes(X[:4])
    assert job.computes(X[4:])
    assert told() == "none of 6 samples repeated in Counted"
    assert job.computes(X[:4])
    assert not job.features._kept


@pytest.mark.parametrize("validated", [False, True])
def test_a_dataset_that_changes_its_samples_at_random_is_not_kept(validated):
    job = Job(where="disk", ahead=0)
    drawn = torch.Generator().manual_seed(2)
    for epoch in range(3):
        job.now.dataset = Dataset(1, "Flipped", 8, epoch + 1)
        for _ in range(2):
            assert job.computes(torch.randn(4, 6, generator=drawn))
        job.now.dataset = Dataset(2, "Plain", 12, epoch + 1)
        if validated:
            assert job.computes(X) is (epoch == 0)
    assert told() == ("Flipped changes its 8 samples at random: none repeated in Counted")
    kept = list((cache_folder() / "features").glob("*/"))
    if validated:
        (found,) = job.features._kept.values()
        assert found.store.kept == 8 + 12  # nothing of the later epochs
    assert bool(kept) is bool(job.features._kept) is validated


def test_room_grows_as_it_is_needed():
    job = Job()
    many = torch.randn(3000, 6)
    for some in many.split(100):
        job(some)
    assert not job.computes(many)


def test_the_model_is_as_it_was_outside_of_a_call():
    job = Job()
    job(X)
    assert "forward" not in vars(job.body)
    torch.save(job.model, io.BytesIO())
    assert torch.equal(copy.deepcopy(job.model)(X), job.model(X))
    with pytest.raises(RuntimeError, match="shapes"):
        job(torch.ones(2, 7))
    assert "forward" not in vars(job.body)


def test_who_has_put_a_forward_of_his_own_there_keeps_it():
    job = Job()
    job.computes(X)
    job.body.forward = lambda x: torch.zeros(len(x), 5)
    assert torch.equal(job(X), job.model[1](torch.zeros(12, 5)))
    assert "forward" in vars(job.body)


def test_a_model_without_frozen_layers_is_left_as_written():
    model = nn.Linear(2, 2)
    assert keep_features(keeping(), model, (), {}, nn.Module.__call__) is nn.Module.__call__
    assert told() == "no leading layers of Linear are frozen and in eval mode"


def test_a_compiled_model_is_left_as_written():
    model = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert keep_features(keeping(), model, (), {}, nn.Module.__call__) is nn.Module.__call__
    assert "compiled" in told()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x):
        return x.sum()


def test_layers_that_give_no_rows_are_left_alone():
    model = nn.Sequential(Pair(), nn.Flatten(0), nn.Linear(1, 1))
    call = keep_features(keeping(), model, (), {}, nn.Module.__call__)
    for _ in range(2):
        call(model, X)
    assert told() == "Pair gives something else than a row for each sample"


def on_each_device(test):
    devices = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
    return pytest.mark.parametrize("device", devices)(test)


@on_each_device
def test_what_frozen_layers_give_is_kept_wherever_they_are(device):
    frozen = Counted(nn.Linear(4, 6), nn.ReLU()).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(6, 2)).to(device)
    x = torch.randn(12, 4, device=device)
    call = keep_features(keeping(), model, (x,), {}, nn.Module.__call__)
    plain = nn.Sequential(*copy.deepcopy(model)).to(device)
    for _ in range(4):
        for rows in x.split(4):
            given = call(model, rows)
            assert given.device.type == device
            torch.testing.assert_close(given, plain(rows))
    assert frozen.calls < 12


@pytest.mark.parametrize("width", [1, 4, 7, 4096])
def test_names_that_are_made_on_a_device_tell_every_bit(width):
    rows = torch.randint(
        0, 256, (64, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    names = hashed(rows)
    assert names.shape == (64, 16)
    assert torch.equal(hashed(rows[10:13]), names[10:13])
    many = rows[:1].repeat(8 * min(width, 64), 1)
    for at, row in enumerate(many):
        row[at // 8 * max(1, width // 64)] ^= 1 << at % 8
    assert len(torch.unique(hashed(many), dim=0)) == len(many)
    zeros = torch.zeros(2, width, dtype=torch.uint8)
    assert torch.equal(*hashed(zeros))


def test_samples_are_told_apart_by_bytes_shape_and_dtype():
    zeros = [
        torch.zeros(1, 4),
        torch.zeros(1, 2, 2),
        torch.zeros(1, 2, dtype=torch.float64),
        torch.zeros(1, 16, dtype=torch.bool),
        torch.zeros(1, 8, dtype=torch.bfloat16),
    ]
    assert len({sample_names(one)[0] for one in zeros}) == len(zeros)
    image = torch.randn(2, 3, 4, 4)
    assert sample_names(image) == sample_names(image.contiguous(memory_format=torch.channels_last))
    assert len(set(sample_names(torch.stack([X[0], X[1], X[0]])))) == 2


def test_memory_is_shared_with_who_has_the_same_layers():
    one, other = Job(), Job()
    one(X[:6])
    other(X[6:])
    assert not one.computes(X)
    assert not other.computes(X)


# ---- on the disk ----


def is_found(job):
    """Whether what another job has kept of X is found; the first batch tells what a row holds."""
    job(X[:2])
    return not job.computes(X[2:])


def test_the_next_run_finds_what_this_one_has_kept_on_the_disk():
    first = Job(where="disk")
    plain = first(X)
    assert dict(record.applied())[FIELD].endswith("on disk")
    del first
    again = Job(where="disk")
    assert is_found(again)
    before = again.body.calls
    assert torch.equal(again(X), plain)
    assert again.body.calls == before
    assert not is_found(Job())  # in memory there is nothing


def test_a_row_whose_bytes_were_flipped_is_computed_again():
    Job(where="disk")(X)
    (rows,) = (cache_folder() / "features").glob("*/rows")
    with open(rows, "r+b") as file:
        file.seek(5 * 24 + 1)
        file.write(b"\xff")
    job = Job(where="disk")
    assert not is_found(job)
    assert told() == "1 row on disk differs from its checksum and is computed again"
    assert not job.computes(X)


class Scaled(nn.Module):
    """What it gives depends on much beside its parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(5), persistent=False)
        self.factor = 2.0
        self.table = torch.ones(5)
        self.function = nn.functional.relu

    def forward(self, x):
        return self.function(x * self.factor + self.shift) * self.table


class Other(Scaled):
    def forward(self, x):
        return super().forward(x) + 1


def of_weight(layers):
    layers[0].weight.view(torch.int32)[0, 0] ^= 1


def of_buffer(layers):
    layers[1].shift[2] += 1e-6


def of_attribute(layers):
    layers[1].factor = 2.5


def of_tensor_attribute(layers):
    layers[1].table = layers[1].table * 2


def of_function(layers):
    layers[1].function = nn.functional.gelu


def of_code(layers):
    layers[1].__class__ = Other


def of_hook(layers):
    layers[1].register_forward_hook(lambda module, args, given: given + 1)


def of_forward(layers):
    layers[1].forward = lambda x: x * 3


def of_mode(layers):
    layers[1].train()


@pytest.mark.parametrize(
    "change",
    [
        of_weight,
        of_buffer,
        of_attribute,
        of_tensor_attribute,
        of_function,
        of_code,
        of_hook,
        of_forward,
        of_mode,
    ],
)
def test_a_run_with_another_body_finds_nothing(change):
    def job():
        torch.manual_seed(0)
        made = Job(nn.Linear(6, 5), Scaled(), where="disk")
        return made, made.body.layers

    job()[0](X)
    assert is_found(job()[0])
    other, layers = job()
    with torch.no_grad():
        change(layers)
    assert not is_found(other)


def test_another_precision_finds_nothing():
    Job(where="disk")(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_found(Job(where="disk"))


def test_what_no_sample_came_again_for_leaves_the_disk(monkeypatch):
    monkeypatch.setattr("flatout.data.features.kept_rows.disk_room", lambda: 6 * 24)
    job = Job(where="disk")
    job(X[:4])
    (folder,) = (cache_folder() / "features").glob("*/")
    job(X[4:])
    assert told() == "none of 6 samples repeated in Counted"
    assert not folder.exists()


class Front(nn.Module):
    """Several frozen layers with a skip, two inputs, and layers that train behind them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.third = nn.Conv2d(8, 6, 3)
        self.head = nn.Linear(7, 2)

    def forward(self, image, extra):
        low = self.first(image).relu()
        high = self.norm(self.second(torch.cat([low, -low], 1)))
        pooled = nn.functional.max_pool2d(high.relu(), 2)
        mean = self.third(pooled).mean((2, 3))
        return self.head(nn.functional.dropout(torch.cat([mean, extra], 1), 0.5, self.training))


class CutJob:
    """A script's calls of a model that is cut."""

    def __init__(self, monkeypatch, where="memory", *, kwargs=False):
        monkeypatch.setattr("flatout.train.parts.features.choice.choose", self.choose)
        self.computed = []
        whole = cut_features._computed
        monkeypatch.setattr(
            cut_features,
            "_computed",
            lambda cut, inputs: (
                self.computed.append(len(cut_features._leaves(inputs)[0])),
                whole(cut, inputs),
            )[1],
        )
        self.model, self.kwargs = self.made(), kwargs
        self.call = keep_features(keeping(where), self.model, (), {}, nn.Module.__call__)

    def look_again(self):
        """Have the next call look whether weights have changed."""
        cells = [cell.cell_contents for cell in self.call.__closure__]
        cut = next(found for found in cells if isinstance(found, cut_features.CutFeatures))
        cut._cut.contents.next_look = 0.0

    @staticmethod
    def choose(options, samples, epochs, plain_s):
        return Choice(min(options, key=lambda one: one.bytes))

    @staticmethod
    def made():
        torch.manual_seed(0)
        model = Front()
        for part in (model.first, model.second, model.norm):
            part.requires_grad_(False)
        model.norm.eval()
        return model

    def __call__(self, image, extra):
        if self.kwargs:
            return self.call(self.model, image=image, extra=extra)
        return self.call(self.model, image, extra)


def pictures(count=12, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 8, 8, generator=draw), torch.randn(count, 1, generator=draw)


@pytest.mark.parametrize("kwargs", [False, True])
def test_a_forward_with_several_frozen_layers_is_cut_once(monkeypatch, kwargs):
    job, plain = CutJob(monkeypatch, kwargs=kwargs), CutJob.made()
    x, extra = pictures()
    results = []
    for call in (job, plain):
        model = plain if call is plain else job.model
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        torch.manual_seed(1)
        for epoch in range(3):
            for at in torch.arange(12).roll(epoch).split(4):
                optimizer.zero_grad()
                call(x[at], extra[at]).square().mean().backward()
                optimizer.step()
        model.eval()
        results.append(call(x, extra))
        model.train()
        model.norm.eval()
    assert torch.equal(*results)
    assert all(map(torch.equal, job.model.parameters(), plain.parameters()))
    assert sum(job.computed) == 12
    words = dict(record.applied())[FIELD]
    assert words.startswith("features kept behind ")
    assert "max_pool2d" in words
    torch.save(job.model, io.BytesIO())
    assert "_call_impl" not in vars(job.model)
    assert told() is None


@pytest.mark.slow
def test_a_cut_that_does_not_hold_any_more_is_looked_for_again(monkeypatch):
    job = CutJob(monkeypatch)
    job(*pictures())
    job(*pictures())
    assert sum(job.computed) == 12
    job.model.first.weight.data.mul_(2)
    job.look_again()
    job(*pictures())
    job(*pictures())
    assert job.computed.pop() == 12
    job.model.second.requires_grad_(True)
    assert job(*pictures()).requires_grad
    job(*pictures())
    assert job.computed == [12, 12]  # as far as the first layer
    job.model.norm.train()
    job.model.first.requires_grad_(True)
    before = job.model.norm.num_batches_tracked.item()
    job(*pictures())
    assert job.model.norm.num_batches_tracked == before + 1
    assert job.computed == [12, 12]


def test_the_next_run_of_a_cut_model_computes_nothing(monkeypatch):
    CutJob(monkeypatch, "disk")(*pictures())
    job = CutJob(monkeypatch, "disk")
    for _ in range(2):
        job(*pictures())
    assert sum(job.computed) == 12  # to know what a row holds
    other = CutJob(monkeypatch, "disk")
    other.model.first.weight.data[0, 0, 0, 0] += 1
    other(*pictures())
    other(pictures()[0], pictures(seed=2)[1])
    assert sum(other.computed) == 24


def test_why_a_model_with_several_frozen_layers_is_not_cut(monkeypatch):
    job = CutJob(monkeypatch)
    job.model.norm.train()
    job(*pictures())
    assert "kept behind" in dict(record.applied())[FIELD]
    why = "norm (BatchNorm2d) changes its own buffers: hold it in evaluation (flatout.freeze)"
    assert told() == f"more could be kept: {why}"
    record.begin({FIELD: "memory"})
    job = CutJob(monkeypatch)
    job.model.first.requires_grad_(True)
    job(*pictures())
    assert told() == "no leading layers of Front are frozen and in eval mode"
    record.begin({FIELD: "memory"})
    job = CutJob(monkeypatch)
    job.model.first.register_forward_hook(lambda *call: None)
    job(*pictures())
    assert told() == "first has a hook, which would run for a trial too"


def test_layers_that_draw_random_numbers_are_left_alone():
    class Noisy(Counted):
        def forward(self, x):
            return super().forward(x) + 1e-6 * torch.rand(())

    job = Job()
    job.body.__class__ = Noisy
    for _ in range(2):
        job(X)
    assert told() == "Noisy draws random numbers"
    assert not job.features._kept


def test_random_samples_that_no_loader_gives_are_told_by_the_evaluations():
    job = Job(where="disk", ahead=0)
    drawn = torch.Generator().manual_seed(2)
    for epoch in range(4):
        for _ in range(2):
            assert job.computes(torch.randn(4, 6, generator=drawn))
        with torch.no_grad():
            assert job.computes(X) is (epoch == 0)
    why = "the script changes its 8 samples at random: none repeated in Counted"
    assert told() == why
    (found,) = job.features._kept.values()
    assert found.store.kept == 8 + 12  # nothing of the later epochs


def test_without_any_sign_of_an_epoch_no_more_than_a_part_of_the_room_is_filled(monkeypatch):
    monkeypatch.setattr("flatout.data.features.kept_rows.disk_room", lambda: 40 * 24)
    job = Job(where="disk", unproven=0.25)
    drawn = torch.Generator().manual_seed(2)
    for _ in range(5):
        assert job.computes(torch.randn(4, 6, generator=drawn))
    assert told() == "none of 12 samples repeated in Counted: samples are kept once some repeat"
    assert not list((cache_folder() / "features").glob("*/"))
    assert job.computes(X)
    assert job.computes(X)  # it has come again, and is kept from now on
    assert not job.computes(X)


@pytest.mark.parametrize("again", [False, True])
def test_a_stream_whose_second_pass_has_none_of_the_first_is_random(again):
    job = Job(ahead=0)
    drawn = torch.Generator().manual_seed(2)
    for passed in (1, 2, 3):
        if again:
            drawn.manual_seed(2)
        for _ in range(2):
            job.now.dataset = Dataset(7, "Stream", None, passed)
            job(torch.randn(4, 6, generator=drawn))
    random = "Stream changes its 8 samples at random: none repeated in Counted"
    assert told() == (None if again else random)


def test_a_dataset_that_is_made_again_for_each_epoch_is_the_same(monkeypatch):
    iterators = dataloader._BaseDataLoaderIter
    monkeypatch.setattr(iterators, "__next__", iterators.__next__)

    class Made(TensorDataset):
        pass

    now, other = DatasetNow(), Made(X)
    now.watch()
    seen = []
    for _ in range(3):
        for _ in DataLoader(Made(X), 4):
            seen.append(now.dataset)
    for _ in DataLoader(other, 4):
        pass
    assert [one.passes for one in seen] == [1] * 3 + [2] * 3 + [3] * 3
    assert len({one.identity for one in seen}) == 1
    for _ in DataLoader([1, 2, 3]):
        assert now.dataset.samples == 3


def test_rows_of_earlier_runs_stay_where_none_of_this_one_comes_again(monkeypatch):
    Job(where="disk")(X)
    (folder,) = (cache_folder() / "features").glob("*/")
    monkeypatch.setattr("flatout.data.features.kept_rows.disk_room", lambda: 0)
    job = Job(where="disk")
    job(torch.randn(4, 6))
    assert told().endswith("samples repeated in Counted")
    assert folder.exists()


@pytest.mark.parametrize("frozen_by", ["requires_grad", "no_grad"])
def test_a_backbone_that_the_script_calls_by_itself_is_kept(frozen_by):
    torch.manual_seed(0)
    body = Counted(nn.Linear(6, 5), nn.ReLU()).eval()
    if frozen_by == "requires_grad":
        body.requires_grad_(False)
    with torch.set_grad_enabled(frozen_by == "requires_grad"):
        call = keep_whole(keeping(), body, (), {}, nn.Module.__call__)
        given = [call(body, X[at]) for at in torch.arange(12).split(4) for _ in range(2)]
    assert body.calls == 3
    assert torch.equal(torch.cat(given[::2]), torch.cat(given[1::2]))
    assert dict(record.applied())[FIELD] == "features of frozen layers of Counted in memory"
    if frozen_by == "no_grad":
        assert call(body, X).requires_grad
        assert body.calls == 4
    # A head alone, the script's root, has no frozen layers.
    keep_features(keeping(), nn.Linear(5, 2), (), {}, nn.Module.__call__)
    assert told() is None


def test_a_module_that_trains_or_has_no_weights_is_no_backbone():
    for module in (nn.CrossEntropyLoss(), nn.Linear(6, 5), nn.Sequential(nn.BatchNorm1d(6))):
        if isinstance(module, nn.Sequential):
            module.requires_grad_(False)
        call = keep_whole(keeping(), module, (), {}, nn.Module.__call__)
        assert call is nn.Module.__call__


HEAD = """
import json, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, dataloader

torch.manual_seed(0)
layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
body = nn.Sequential(*layers)
body.requires_grad_(False).eval()
body.register_forward_pre_hook(lambda *_: calls.append(1))
forward = body[0].forward
computed, calls = [], []
body[0].forward = lambda x: (computed.append(len(x)), forward(x))[1]
model = nn.Sequential(body, nn.Linear(32, 3))
optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
data = TensorDataset(torch.randn(40, 3, 8, 8), torch.randint(0, 3, (40,)))
for epoch in range(4):
    for x, y in DataLoader(data, 8, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
with torch.no_grad():
    right = model(data.tensors[0]).argmax(1).tolist()
print(json.dumps([sum(computed), len(calls), model[1].weight.tolist(), right]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["model(", "model[1](body("])
def test_a_script_learns_the_same_and_computes_each_sample_once(scripts, tmp_path, calls):
    path = tmp_path / "train.py"
    called = HEAD if calls == "model(" else HEAD.replace("model(x)", "model[1](body(x))")
    path.write_text(
        called.replace("model(data.tensors[0])", f"{calls}data.tensors[0]" + ")" * calls.count("("))
    )
    plain, cured = scripts.run(path), scripts.run(path, "script.features=memory")
    assert plain.code == cured.code == 0, cured.err
    assert cured.applied == {FIELD: "features of frozen layers of Sequential in memory"}
    assert not cured.left
    all_of_it, calls, weights, right = json.loads(plain.out)
    once, *rest = json.loads(cured.out)
    assert (all_of_it, once) == (200, 40 + 4 * 8)  # and the four batches that are checked
    assert rest == [calls, weights, right]  # its hooks still run


@pytest.mark.slow
def test_a_script_that_augments_by_hand_fills_no_disk(scripts, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        HEAD.replace("model(x)", "model(x + torch.rand(()))").replace("range(4)", "range(8)")
    )
    folder = tmp_path / "cache"
    plain = scripts.run(path)
    cured = scripts.run(path, "script.features=disk", environment={"FLATOUT_CACHE": str(folder)})
    assert plain.code == cured.code == 0, cured.err
    assert json.loads(cured.out) == json.loads(plain.out)
    assert cured.left == {
        FIELD: "TensorDataset changes its 40 samples at random: none repeated in Sequential"
    }
    assert not list((folder / "features").glob("*/"))


@pytest.mark.slow
def test_the_next_run_of_a_script_computes_what_is_checked_alone(scripts, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD)
    environment = {"FLATOUT_CACHE": str(tmp_path / "cache")}
    first, second = (
        json.loads(scripts.run(path, "script.features=disk", environment=environment).out)
        for _ in range(2)
    )
    assert (first[0], second[0]) == (40 + 4 * 8, 4 * 8)
    assert first[1:] == second[1:]
