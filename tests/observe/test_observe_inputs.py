"""What models are called with is looked at now and then."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from flatout.observe.held_out import compare
from flatout.observe.models import Models
from flatout.observe.observation import Loader
from flatout.observe.samples import label_runs, labels_of, samples_in, samples_of
from flatout.observe.tables import _has, _rows
from flatout.observe.watch import Watch


def test_inputs_are_looked_at_the_more_seldom_the_more_calls_there_were():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, rows):
            return rows * self.weight

    watch = Watch()
    Models(torch, watch).watch_class(Model)
    watch.lanes.steps = 1
    model, rows = Model(), torch.zeros(3)
    looks = []
    for most in (32, 1024, 16384):
        while not watch.models or watch.models[0].calls < most:
            model(rows)
        looks.append(watch.models[0].shapes.total())
    assert looks[0] == 32  # each of the first
    assert 24 <= looks[1] - looks[0] <= 36
    assert 16 <= looks[2] - looks[1] <= 28
    model(torch.zeros(5))
    assert len(watch.models[0].shapes) == 1
    for _ in range(2100):
        model(torch.zeros(5))
    assert len(watch.models[0].shapes) == 2  # never given up


def test_looking_at_rows_of_a_batch_keeps_nothing_for_backward():
    saved = []
    batch = torch.randn(16, 8, requires_grad=True) * 2
    keep = torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one), lambda one: one)
    with keep:
        assert _rows(batch) is not None
    assert not saved  # checkpointing runs forward again, and counts what was saved


@pytest.mark.parametrize(
    "held",
    [
        lambda images: images,
        lambda images: images.double().numpy(),
        lambda images: images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        lambda images: images.flatten(1),
    ],
    ids=["tensor", "array", "channels_last", "flat"],
)
def test_rows_of_a_batch_are_known_in_their_table_behind_a_background(held):
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(500, 1, 28, 28, generator=draw)
    images[:, :, :8] = images[:, :, :, :8] = 0  # as handwriting has it, in its first numbers too
    batch = images[37:69]
    assert _has(held(images), _rows(batch))
    assert not _has(held(images), _rows(batch * 1.01))
    assert not _has(held(images[:60]), _rows(batch))  # its last rows are not there


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int64])
def test_rows_are_known_in_a_table_of_another_dtype(dtype):
    table = torch.arange(40_000).remainder(251).reshape(1000, 40).to(dtype)
    assert _has(table, _rows(table[100:164].float()))
    assert not _has(table, _rows(table[100:164].float() + 0.5))


class OfFrame:
    """A dataset of the rows of a table of pandas."""

    def __init__(self, frame):
        self.frame = frame

    def __len__(self):
        return len(self.frame)


def test_labels_are_seen_as_floats_and_as_a_column_of_a_table():
    pandas = pytest.importorskip("pandas")
    halves, x = torch.arange(64) // 32, torch.randn(64, 3)
    for y in (halves, halves.float(), halves.float()[:, None]):
        assert label_runs(labels_of(TensorDataset(x, y))) == (2, 2, 64, 32)
    assert label_runs(labels_of(TensorDataset(x, 2.5 * halves))) is None  # numbers, to be fitted
    frame = pandas.DataFrame({"age": range(64), "Target": halves.numpy()})
    assert label_runs(labels_of(OfFrame(frame))) == (2, 2, 64, 32)
    assert label_runs(labels_of(OfFrame(frame[["age"]]))) is None


@pytest.mark.parametrize("columns", [(), (1,), (3,)])
def test_windows_of_training_moved_by_a_step_are_known(columns):
    series = torch.randn(500, *columns)
    windows = torch.stack([series[at : at + 24] for at in range(476)])
    order = torch.randperm(476, generator=torch.Generator().manual_seed(0))

    def shared(trained, held_out):
        sets = [(Loader("", in_training=at == 0), samples_in(of)) for at, of in
                enumerate((trained, held_out))]  # fmt: skip
        compare(sets, SimpleNamespace(of_both=lambda *given: None))
        assert sets[1][0].shared_rows in ((0, len(held_out)), None)
        return sets[1][0].shared_windows / len(held_out)

    assert shared(windows[order[:380]], windows[order[380:]]) > 0.8
    assert shared(windows[:380], windows[380:]) < 0.02
    assert shared(windows[:380:24], windows[12:380:24]) == 0  # that meet, but not by a step
    assert shared(torch.randn(380, 24, 1), torch.randn(96, 24, 1)) == 0
    classes = torch.eye(64)[torch.randint(64, (500,))]  # each is another one, moved
    assert shared(classes[:400], classes[400:]) == 0


def shared_rows(trained, held_out):
    """How many samples are told to be shared."""
    sets = [
        (Loader("", in_training=is_trained), samples_of(of))
        for is_trained, of in ((True, trained), (False, held_out))
    ]
    compare(sets, SimpleNamespace(of_both=lambda *given: None))
    return (sets[1][0].shared_rows or (0, 0))[0]


def test_samples_of_few_columns_are_shared_where_chance_does_not_make_them_equal():
    draw = torch.Generator().manual_seed(0)
    table = torch.rand(600, 4, generator=draw)
    table[:, 2:] = torch.randint(0, 40, (600, 2), generator=draw).float()
    first, second = (torch.randperm(600, generator=draw) for _ in range(2))
    assert shared_rows(TensorDataset(table[first[:480]]), TensorDataset(table[second[:120]])) > 60
    assert not shared_rows(TensorDataset(table[first[:480]]), TensorDataset(table[first[480:]]))


@pytest.mark.parametrize("is_cleared", [False, True], ids=["as_drawn", "each_once"])
def test_samples_of_few_values_are_equal_by_chance(is_cleared):
    drawn = torch.randint(0, 12, (1500, 4), generator=torch.Generator().manual_seed(0)).float()
    trained = drawn[:1200].unique(dim=0) if is_cleared else drawn[:1200]
    assert not shared_rows(TensorDataset(trained), TensorDataset(drawn[1200:]))
    # Hours of the days of a week and a month, each once in two years.
    hours = torch.cartesian_prod(torch.arange(365), torch.arange(24)).float()
    angles = torch.cat([hours, torch.sin(hours / 7), torch.cos(hours / 24)], 1)
    assert not shared_rows(TensorDataset(angles[:8000]), TensorDataset(angles[:2000].clone()))


def test_rows_of_data_frames_are_compared_with_what_they_lack():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(torch.rand(300, 5).numpy()).astype("float64")
    frame[0] = frame[0].where(frame[0] > 0.2)  # else it is not known
    trained, held_out = frame.sample(frac=0.8, random_state=0), frame.sample(60, random_state=1)
    assert shared_rows(OfFrame(trained), OfFrame(held_out)) > 30
    assert not shared_rows(OfFrame(trained), OfFrame(frame.drop(trained.index)))
    frame["tags"] = [[] for _ in range(300)]  # which cannot be compared
    assert not shared_rows(OfFrame(frame[:200]), OfFrame(frame[100:]))


class Picked:
    """A dataset of some rows of a table."""

    def __init__(self, table, rows):
        self.table, self.rows = table, rows

    def __len__(self):
        return len(self.rows)


class Scaled:
    """A dataset that scales its rows as they are read."""

    def __init__(self, table, mean, deviation):
        self.table, self.mean, self.deviation = table, mean, deviation

    def __len__(self):
        return len(self.table)

    def __getitem__(self, at):
        return (self.table[at] - self.mean) / self.deviation


def scaling(trained, held_out):
    """What is told of how both were scaled."""
    sets = [
        (Loader("", in_training=is_trained), samples_of(of))
        for is_trained, of in ((True, trained), (False, held_out))
    ]
    compare(sets, SimpleNamespace(of_both=lambda *given: None))
    return sets[1][0].scaling


@pytest.mark.parametrize("is_leaking", [True, False], ids=["of_all", "of_training"])
def test_a_normalization_of_all_is_found_behind_datasets_of_ones_own(is_leaking):
    table = 20 + 4 * torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    figures = table if is_leaking else table[:280]
    mean, deviation = figures.mean(0), figures.std(0)
    scaled = (table - mean) / deviation
    parts = range(280), range(280, 340)  # a test has the rest
    assert bool(scaling(*(Picked(scaled, [*rows]) for rows in parts))) is is_leaking
    lists = [[(row, at) for at, row in enumerate(part)] for part in scaled.split((280, 120))]
    assert bool(scaling(*lists)) is is_leaking
    own = scaling(*(Scaled(part, mean, deviation) for part in table.split((280, 120))))
    assert bool(own and own.is_held and own.samples == 400) is is_leaking


def of_range(table, of):
    low, high = of.min(0).values, of.max(0).values
    return (table - low) / (high - low)


def of_quantiles(table, of):
    low, middle, high = of.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=0)
    return (table - middle) / (high - low)


def both_signs(table, of):
    return 2 * of_range(table, of) - 1


def of_all_numbers(table, of):
    return (table - of.min()) / (of.max() - of.min())


@pytest.mark.parametrize("columns", [4, 9])
@pytest.mark.parametrize("scale", [of_range, of_quantiles, both_signs], ids=lambda by: by.__name__)
def test_a_scaling_by_hand_of_all_samples_is_found_and_none_of_the_training(scale, columns):
    drawn = torch.Generator().manual_seed(columns)
    table = 50 + 9 * torch.randn(300, columns, generator=drawn)
    table[:, 1] = table[:, 1].exp().clamp(max=table[:, 1].exp().quantile(0.9))  # often at its end
    table[225, 0], table[230, 2] = 0, 100
    flags = torch.randint(0, 2, (300, 2), generator=drawn).float()
    train, held_out = range(220), range(220, 300)
    for rows, is_leaking in ((range(300), True), (train, False)):
        scaled = torch.cat([scale(table, table[: len(rows)]), flags], 1)
        for of_train, of_others in (
            (TensorDataset(scaled[:220]), TensorDataset(scaled[220:])),
            (Picked(scaled, [*train]), Picked(scaled, [*held_out])),
            (Picked(scaled, [*train]), Picked(scaled, [*held_out[:30]])),  # a test has the rest
        ):
            found = scaling(of_train, of_others)
            assert bool(found) is is_leaking
            by = "median" if scale is of_quantiles else "minimum and maximum"
            assert found is None or found.by == by


def test_a_scaling_to_the_range_of_all_numbers_is_found():
    table = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    table[390, 2] = 5.0
    parts = [TensorDataset(part) for part in of_all_numbers(table, table).split((300, 100))]
    assert scaling(*parts).misses > 0.05
    own = [TensorDataset(part) for part in of_all_numbers(table, table[:300]).split((300, 100))]
    assert scaling(*own) is None


@pytest.mark.parametrize("is_leaking", [True, False], ids=["of_all", "of_training"])
def test_ends_of_all_that_a_dataset_scales_by_are_found(is_leaking):
    table = 20 + 4 * torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    table[300, 1] = 50
    figures = table if is_leaking else table[:280]
    low, high = figures.min(0).values, figures.max(0).values
    own = scaling(*(Scaled(part, low, high - low) for part in table.split((280, 120))))
    assert bool(own and own.is_held and own.by == "minimum and maximum") is is_leaking


def in_unit_range():
    """Tables between 0 and 1 that were scaled by no figures of theirs, by name."""
    drawn = torch.Generator().manual_seed(0)
    shape = (400, 12)
    pixels = torch.randint(-80, 330, shape, generator=drawn).clamp(0, 255) / 255
    dark = pixels * (torch.arange(12) % 3 > 0)
    shares = torch.rand(shape, generator=drawn)
    reached = shares.clone()
    reached[0], reached[1] = 0, 1  # by chance, and in training
    order = torch.stack([torch.randperm(400, generator=drawn) for _ in range(12)], 1)
    flags = torch.randint(0, 2, shape, generator=drawn).float()
    grades = torch.randint(0, 11, shape, generator=drawn) / 10
    time = torch.linspace(0, 1, 400)[:, None].expand(*shape)
    pictures = torch.rand(400, 28, 28, generator=drawn).flatten(1)
    pictures[:3], pictures[-3:] = 0, 1
    return {
        "pixels": pixels, "dark": dark, "shares": shares, "reached": reached,
        "ranks": order / 399, "flags": flags, "grades": grades, "time": time,
        "pictures": pictures, "softmax": (9 * shares).softmax(1), "tanh": (9 * shares - 4).tanh(),
        "zeros": torch.zeros(shape), "sines": (time * 40 * torch.arange(1, 13)).sin(),
    }  # fmt: skip


@pytest.mark.parametrize("name", in_unit_range())
def test_what_lies_between_0_and_1_by_nature_was_not_scaled(name):
    table = in_unit_range()[name]
    assert scaling(*(TensorDataset(part) for part in table.split((300, 100)))) is None
