"""augment: what it draws depends on (seed, epoch, sample) alone, and what it makes is as said."""

import numpy as np
import pytest
import torch
from data_made_up import same

import flatout
from flatout.data.augmentation.resized_crop import ResizedCrop
from flatout.data.execution.samples import Costs
from flatout.data.execution.varying import variant, variants
from flatout.data.randomness import Draws
from flatout.data.reading.buffers import Buffers
from flatout.errors import DataError


def stored(rows=40, height=6, width=6, channels=3, seed=0):
    """As `images` gives them: uint8 with the channels last in memory."""
    draw = torch.Generator().manual_seed(seed)
    shape = (rows, height, width, channels)
    pixels = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    return pixels.permute(0, 3, 1, 2)


def plain(x=None):
    x = stored() if x is None else x
    return flatout.data.arrays(x, torch.arange(len(x)))


def in_order(pipeline, epoch=0):
    """The inputs of an epoch, by the samples' numbers."""
    batches = list(pipeline.batches(epoch))
    numbers = torch.cat([batch.indices for batch in batches])
    return torch.cat([batch.inputs for batch in batches])[numbers.argsort()]


def drawn_of(pipeline, epoch):
    """Which variant each sample has in an epoch."""
    samples = pipeline._built.plan.samples
    return variant(samples, np.arange(samples.rows), epoch)


TURNED = {
    "horizontal": [lambda x: x, lambda x: x.flip(2)],
    "vertical": [lambda x: x, lambda x: x.flip(1)],
    "both": [lambda x: x, lambda x: x.flip(2), lambda x: x.flip(1), lambda x: x.flip(1, 2)],
    90: [lambda x, k=k: x.rot90(k, (1, 2)) for k in range(4)],
}


@pytest.mark.parametrize("layout", ["channels_last", "planes", "gray", "last", "float"])
@pytest.mark.parametrize("what", ["horizontal", "vertical", "both", 90])
def test_flips_and_turns_are_those_of_torch_each_about_as_often(what, layout):
    x = stored(64)
    given = {"channels_last": x, "planes": x.contiguous(), "gray": x[:, 0].contiguous()}
    given |= {"last": x.permute(0, 2, 3, 1), "float": x / 255}
    given = given[layout]
    augmented = plain(given).augment(**({"rotate": 90} if what == 90 else {"flip": what}))
    found = in_order(augmented.shuffle(seed=3).batch(7), 1)
    assert found.dtype == given.dtype
    if layout == "last":
        assert found.shape == given.shape
        found, given = found.permute(0, 3, 1, 2), given.permute(0, 3, 1, 2)
    elif layout == "gray":
        found, given = found[:, None], given[:, None]
    choices = TURNED[what]
    which = [
        next(at for at, turned in enumerate(choices) if torch.equal(turned(image), made))
        for image, made in zip(given, found, strict=True)
    ]
    counts = np.bincount(which, minlength=len(choices))
    assert counts.min() > 64 / len(choices) / 3


def test_flip_and_turn_together_are_the_eight_orientations_and_a_variant_is_one_result():
    x = stored(400)
    pipeline = plain(x).augment(flip="both", rotate=90).batch(50)
    assert variants(pipeline._built.plan.samples, np.arange(400)) == 8
    which = drawn_of(pipeline, 0)
    assert np.bincount(which).min() > 25
    eight = [
        (x.flip(3) if mirrored else x).rot90(k, (2, 3))
        for mirrored in (False, True)
        for k in range(4)
    ]
    want = torch.stack([eight[at][row] for row, at in enumerate(which)])
    assert torch.equal(in_order(pipeline), want)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"flip": "horizontal"}, 2),
        ({"five_crop": 4}, 5),
        ({"five_crop": 4, "flip": "horizontal", "rotate": 90}, 40),
        ({"crop": 4, "flip": "both", "views": 3}, 3),
    ],
)
def test_equal_variants_are_equal_images_in_every_epoch(options, count):
    x = stored(20)
    pipeline = plain(x).augment(**options).batch(20)
    samples = pipeline._built.plan.samples
    assert variants(samples, np.arange(20)) == count
    seen = {}
    for epoch in range(12):
        which = drawn_of(pipeline, epoch)
        assert which.min() >= 0
        assert which.max() < count
        for row, image in enumerate(in_order(pipeline, epoch)):
            kept = seen.setdefault((row, which[row]), image)
            assert torch.equal(kept, image)
    assert len(seen) > 20 * min(count, 12) * 0.5


def test_stages_multiply_and_a_function_between_them_does_not_matter():
    def brighter(x, y):
        return x // 2, y

    def noisy(x, y, rng):
        return x + int(rng.integers(2)), y

    twice = plain().augment(flip="horizontal").map(brighter).augment(rotate=90).map(brighter)
    pipeline = twice.batch(8)
    samples, numbers = pipeline._built.plan.samples, np.arange(40)
    assert variants(samples, numbers) == 8
    pairs = {(int(v) // 4, int(v) % 4) for e in range(5) for v in drawn_of(pipeline, e)}
    assert len(pairs) == 8  # the two stages draw independently
    assert variants(plain().batch(8)._built.plan.samples, numbers) == 1
    for other in (twice.map(noisy), plain().map(noisy).augment(rotate=90), plain().augment(crop=3)):
        assert variants(other.batch(8)._built.plan.samples, numbers) is None


def test_draws_depend_on_seed_epoch_and_sample_alone():
    def batches(threads=None, seed=1, epoch=2, start=0):
        made = plain().augment(flip="both", crop=4, padding=1).shuffle(seed=seed).batch(7)
        return list(made.options(threads=threads).batches(epoch, start))

    whole = batches()
    for other in (batches(threads=1), batches(threads=3)):
        assert all(map(same, whole, other))
    assert all(map(same, batches(start=3), whole[3:]))
    pipeline = plain().augment(flip="both", crop=4, padding=1)
    ranks = [pipeline.shuffle(seed=1).batch(7).shard(rank, 3) for rank in range(3)]
    parts = zip(*(rank.batches(2) for rank in ranks), strict=True)
    for batch, part in zip(whole, parts, strict=True):
        assert torch.equal(torch.cat([one.inputs for one in part]), batch.inputs)
    first = [
        in_order(pipeline.shuffle(seed=seed).batch(7), e) for seed, e in [(1, 2), (1, 3), (2, 2)]
    ]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    # A filter and another order leave a sample's draws as they are.
    some = plain().filter(lambda x, y: y % 2 == 0).augment(flip="both", crop=4, padding=1)
    assert torch.equal(in_order(some.shuffle(seed=1).batch(5), 2), first[0][::2])


def test_draws_are_uniform_and_apart():
    numbers = np.arange(20_000)
    draws = [
        Draws(numbers, *key).uniform(at) for key in [(0, 0), (0, 1), (1, 0)] for at in range(3)
    ]
    for one in draws:
        assert abs(one.mean() - 0.5) < 0.01
        assert one.min() >= 0
        assert one.max() < 1
        assert np.histogram(one, 10, (0, 1))[0].min() > 1_800
    together = np.corrcoef(draws)
    assert np.abs(together - np.eye(len(draws))).max() < 0.03
    assert Draws(np.array([3]), -5, 2**70).below(10, 0)[0] in range(10)
    # What no version may change: runs are continued by it.
    assert Draws(np.array([0, 7]), 1, 2).uniform(0).tolist() == [
        0.4586366009457423,
        0.2756877083649403,
    ]


def test_crops_are_parts_of_the_padded_image():
    x = stored(30, 5, 7)
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    for epoch in range(2):
        found = in_order(plain(x).augment(crop=(6, 4), padding=2).batch(8), epoch)
        assert found.shape == (30, 3, 6, 4)
        places = set()
        for image, made in zip(padded, found, strict=True):
            parts = {(t, u): image[:, t : t + 6, u : u + 4] for t in range(4) for u in range(8)}
            places |= {at for at, part in parts.items() if torch.equal(part, made)}
        assert len(places) > 10
    found = in_order(plain(x).augment(five_crop=3).batch(8))
    for image, made in zip(x, found, strict=True):
        corners = [(0, 0), (0, 4), (2, 0), (2, 4), (1, 2)]
        assert any(torch.equal(image[:, t : t + 3, u : u + 3], made) for t, u in corners)


def test_colors_change_by_factors_that_are_drawn_for_each_image():
    x = torch.full((200, 3, 4, 4), 100, dtype=torch.uint8)
    found = in_order(plain(x).augment(brightness=0.5).batch(50))
    assert torch.equal(found, found[:, :1, :1, :1].expand_as(found))
    values = found[:, 0, 0, 0].tolist()
    assert min(values) in range(50, 60)
    assert max(values) in range(140, 151)
    # One color is its own gray, to a gray level for each of the two.
    found = in_order(plain(x).augment(contrast=0.5, saturation=0.5).batch(50)).int()
    assert (found - 100).abs().max() <= 2
    assert variants(plain().augment(contrast=1).batch(8)._built.plan.samples, np.arange(40)) is None


def test_cutout_is_one_square_of_zeros_around_any_pixel():
    x = torch.full((300, 3, 6, 8), 9, dtype=torch.uint8)
    pipeline = plain(x).augment(cutout=3).batch(64)
    lost = (in_order(pipeline) == 0).all(1)
    assert torch.equal(lost, (in_order(pipeline) == 0).any(1))
    middles = set()
    for one in lost:
        rows, columns = one.any(1).nonzero()[:, 0], one.any(0).nonzero()[:, 0]
        assert one.sum() == len(rows) * len(columns)  # one rectangle
        assert 2 <= len(rows) <= 3
        assert 2 <= len(columns) <= 3
        top = int(rows[0]) if rows[-1] == 5 or rows[0] else int(rows[-1]) - 2
        left = int(columns[0]) if columns[-1] == 7 or columns[0] else int(columns[-1]) - 2
        middles.add((top + 1, left + 1))
    assert len(middles) == 6 * 8
    assert not torch.equal(in_order(pipeline, 0), in_order(pipeline, 1))
    assert variants(pipeline._built.plan.samples, np.arange(300)) is None


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (10, 200), (200, 10)])
def test_resized_crops_are_drawn_by_torchvisions_rule(shape):
    height, width = shape
    crop = ResizedCrop.of(8)
    top, left, high, wide = crop.places(height, width, Draws(np.arange(4_000), 1)).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + high <= height).all()
    assert (left + wide <= width).all()
    # The same rule step by step, with its own generator: distributions agree.
    generator = np.random.default_rng(2)
    want = []
    for _ in range(4_000):
        for _ in range(10):
            area = height * width * generator.uniform(0.08, 1)
            ratio = np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3)))
            h, w = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                break
        else:
            h, w = min(height, round(width / 0.75)), min(width, round(height * 4 / 3))
        want.append((h, w))
    for found, expected in zip((high, wide), np.array(want).T, strict=True):
        assert abs(found.mean() / expected.mean() - 1) < 0.03
        assert abs(found.std() - expected.std()) < 0.05 * expected.mean()
    if max(shape) < 100:  # elsewhere some lie in the middle
        places = (top + high / 2).mean() / height, (left + wide / 2).mean() / width
        assert np.allclose(places, 0.5, atol=0.02)


def test_a_resized_crop_is_that_part_resized_then_flipped():
    x = stored(20, 30, 40)
    options = {"size": (12, 16), "scale": (0.3, 0.6), "ratio": (1, 2)}
    pipeline = plain(x).augment(random_resized_crop=options, flip="vertical").shuffle(seed=4)
    found = in_order(pipeline.batch(7), 3)
    assert found.shape == (20, 3, 12, 16)
    draws = Draws(np.arange(20), 4, 0, 0, 3)
    places = ResizedCrop.of(options).places(30, 40, draws)
    flipped = 0
    for image, made, (top, left, high, wide) in zip(x, found, places.tolist(), strict=True):
        assert 0.25 < high * wide / 1200 < 0.65
        assert 0.9 < wide / high < 2.2
        part = image[None, :, top : top + high, left : left + wide].contiguous().float()
        want = torch.nn.functional.interpolate(part, (12, 16), mode="bilinear", antialias=True)[0]
        errors = [(one - made.float()).abs().max() for one in (want, want.flip(1))]
        assert min(errors) <= 1
        flipped += int(errors[1] < errors[0])
    assert 3 < flipped < 17
    floats = plain(x / 255).augment(random_resized_crop=8).batch(20)
    assert in_order(floats).shape == (20, 3, 8, 8)
    assert variants(floats._built.plan.samples, np.arange(20)) is None
    views = plain(x).augment(random_resized_crop=8, views=3).batch(20)
    assert variants(views._built.plan.samples, np.arange(20)) == 3
    assert "dict(size=(12, 16), scale=(0.3, 0.6), ratio=(1, 2))" in repr(pipeline)


def test_a_cache_behind_augment_holds_what_was_there_before_it():
    twice = plain().map(lambda x, y: (x // 2, y))
    want = [in_order(twice.augment(flip="both").shuffle(seed=1).batch(8), e) for e in range(3)]
    cached = twice.augment(flip="both").cache("memory").shuffle(seed=1).batch(8)
    for epoch in (0, 1, 2, 1):
        assert torch.equal(in_order(cached, epoch), want[epoch])
    assert "cache before augment(flip='both')" in "".join(cached.notes())
    runs = cached.explanation().runs
    assert runs.index("CACHE") < runs.index("augment(flip='both')")


@pytest.mark.parametrize("kept", ["channels last", "rows last", "gray", "apart", "on the disk"])
def test_images_in_memory_are_changed_where_they_lie(kept, tmp_path):
    x = stored(30)
    if kept != "channels last":
        x = x.permute(0, 2, 3, 1)
    if kept == "gray":
        x = x[..., 0].contiguous()
    if kept == "apart":
        x = torch.cat([x, x], 1)[:, : x.shape[1]]
    options = {"crop": 5, "padding": 1, "flip": "both"}
    there = plain(x).map(lambda x, y: (x, y))
    if kept == "on the disk":
        direct = there.cache("disk", folder=str(tmp_path)).augment(**options)
        list(direct.batch(8).batches(0))  # only then all of them are kept
    else:
        direct = plain(x).augment(**options)
    direct, copied = (one.shuffle(seed=3).batch(7) for one in (direct, there.augment(**options)))
    for epoch in range(2):
        assert torch.equal(in_order(direct, epoch), in_order(copied, epoch))
    samples = direct._built.plan.samples
    lent = samples.inner.lend(np.array([3, 1]), Buffers(), Costs(), samples._is_of_use)
    assert lent.places.tolist() == [3, 1]
    assert {*lent.block.columns, *lent.whole} == {"inputs", "targets"}
    if kept != "on the disk":
        assert np.shares_memory(lent.whole["inputs"], x.numpy())
    assert not hasattr(copied._built.plan.samples.inner, "lend")


def test_images_that_must_be_copied_first_are():
    x = stored(30).contiguous()  # color by color
    options = {"crop": 5, "padding": 1, "flip": "both"}
    found, want = (in_order(plain(one).augment(**options).batch(8)) for one in (x, stored(30)))
    assert torch.equal(found, want)
    scaled = flatout.data.arrays(stored(30), torch.arange(30), scale=0.5, shift=1.0)
    assert torch.equal(in_order(scaled.augment(flip="both").batch(8)).min(), torch.tensor(1.0))


def test_it_is_explained_and_normalized_behind():
    pipeline = plain().augment(flip="horizontal", views=4).batch(8)
    text = str(pipeline.explanation())
    assert "augment(flip='horizontal', views=4)" in text
    assert "changes learning: each sample has 4 draws" in text
    assert "augment(flip='horizontal', views=4)" in repr(pipeline)
    normal = plain().augment(flip="horizontal").normalize(0.5, 0.5).batch(8)
    assert normal.peek(1)[0].inputs.dtype == torch.float32
    assert normal.explanation().runs[-1] == "normalize"
    words = [plain().augment(flip=flip).batch(8).stage_words for flip in ("both", "vertical")]
    assert words[0] != words[1]
    digests = {plain().augment(flip=flip).batch(8).digest for flip in ("both", "vertical")}
    assert len({*digests, plain().batch(8).digest}) == 3


def test_bad_arguments_say_what_to_do():
    for options, words in [
        ({}, "nothing to do"),
        ({"views": 3}, "nothing to do"),
        ({"flip": "up"}, "'horizontal', 'vertical' or 'both', found 'up'"),
        ({"flip": True}, "found True"),
        ({"rotate": 45}, "rotate=90, for quarter turns, found 45"),
        ({"crop": 0}, "an int from 1, or as height and width, found 0"),
        ({"crop": (1, 2, 3)}, r"found \(1, 2, 3\)"),
        ({"crop": 2, "padding": -1}, "padding in pixels from 0, found -1"),
        ({"brightness": -0.1}, "brightness as a number from 0 to 9, found -0.1"),
        ({"padding": 1}, "pass crop=SIZE"),
        ({"crop": 2, "five_crop": 2}, "exclude each other"),
        ({"crop": 2, "random_resized_crop": 2}, "crop and random_resized_crop exclude"),
        ({"random_resized_crop": {"scale": (0.1, 1)}}, "lacks a size"),
        ({"random_resized_crop": {"size": 4, "scales": 1}}, "size, scale and ratio .*'scales'"),
        ({"random_resized_crop": {"size": 4, "scale": (0.5, 2)}}, "above 0 up to 1, found"),
        ({"random_resized_crop": {"size": 4, "ratio": (2, 1)}}, "two ascending numbers above 0,"),
        ({"cutout": 0}, "cutout in pixels from 1, found 0"),
        ({"flip": "both", "views": 0}, "views as an int from 1, found 0"),
    ]:
        with pytest.raises(DataError, match=words):
            plain().augment(**options)


def test_bad_images_are_errors_before_the_first_step(tmp_path):
    masks = flatout.data.arrays(stored(), stored()[:, 0])
    for pipeline, words in [
        (plain(stored(8, 6, 5)).augment(rotate=90), "square images, found 6 x 5"),
        (plain().augment(crop=7), "crop of 7 x 7 is larger than the images of 6 x 6"),
        (plain().augment(crop=9, padding=1), "of 6 x 6 with 2 of padding"),
        (plain().augment(five_crop=(2, 7)), "five_crop of 2 x 7 is larger"),
        (plain(torch.ones(8, 5)).augment(flip="both"), r"found .*float32 of shape \(5,\)"),
        (plain(torch.ones(8, 5, 5)).augment(flip="both"), "a dimension of one channel"),
        (plain(stored()[:, :1]).augment(saturation=0.5), "gray ones have none"),
        (plain(stored() / 255).augment(contrast=0.5), "want uint8 images .*found float32"),
        (plain().augment(cutout=7), "cutout=7 is larger than the images of 6 x 6"),
        (plain(stored().int()).augment(random_resized_crop=4), "uint8 or float32 .*found int32"),
        (masks.augment(flip="both"), "would not move with the pixels"),
    ]:
        with pytest.raises(DataError, match=words):
            pipeline.batch(4).steps  # noqa: B018
    with pytest.raises(DataError, match="put augment before batch"):
        plain().batch(4).augment(flip="both")
    with pytest.raises(DataError, match="put filter before augment"):
        plain().augment(flip="both").filter(lambda x, y: True)
    with pytest.raises(DataError, match="one draw of augment, for all epochs"):
        flatout.data.convert(plain().augment(flip="both"), tmp_path / "a.rows")
