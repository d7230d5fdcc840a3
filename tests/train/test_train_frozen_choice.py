"""What is kept is what is fastest over the epochs that are left."""

import pytest

from flatout.train.parts.features.choice import FeatureOption, choose
from flatout.train.parts.features.costs import Costs

GB = 10**9


def option(name="late", saved=0.09, size=400_000, variants=1, read=0.0002, room=100 * GB, **more):
    return FeatureOption(name, saved, size, variants, read, room, **more)


def test_the_fastest_cut_wins_though_another_is_later():
    late = option("late", saved=0.09, size=4_000_000, read=0.02)
    pooled = option("pooled", saved=0.089, size=1_000_000, read=0.001)
    found = choose([late, pooled], 1000, 5, 0.1)
    assert found.kept is pooled
    assert found.pays_from == 2
    assert found.later_s == pytest.approx(0.012)
    assert found.whole_bytes == 10**9


def test_of_what_is_made_beside_the_device_the_longer_counts():
    by_cpus = Costs(made=0.03, prefix=0.01, live=0.002, read=0.001, is_beside=True)
    assert (by_cpus.plain_s, by_cpus.read_s) == (0.03, 0)
    assert by_cpus.saved_s == pytest.approx(0.028)
    assert by_cpus._replace(read=0.02).saved_s == pytest.approx(0.01)
    assert by_cpus._replace(read=0.04).saved_s == 0
    alone = by_cpus._replace(is_beside=False)
    assert (alone.plain_s, alone.read_s) == pytest.approx((0.042, 0.001))
    assert alone.saved_s == pytest.approx(0.04)


def test_a_single_epoch_keeps_nothing_unless_all_is_there():
    assert choose([option()], 1000, 1, 0.1).why == "nothing kept: a single epoch is left"
    found = choose([option(filled=1.0)], 1000, 1, 0.1)
    assert found.pays_from == 1
    assert found.words("disk", "bf16") == (
        "kept late (0.4 MB a sample in bf16: 0.4 GB on disk, 100.0 GB free) · pays from the start: "
        "10 -> 98 samples/s"
    ).replace("0.4 MB", "400.0 kB").replace("0.4 GB", "400.0 MB")


def test_reading_that_takes_longer_than_computing_keeps_nothing():
    found = choose([option(saved=0.001, read=0.002)], 1000, 10, 0.1)
    assert found.kept is None
    assert "reading takes 2 ms" in found.why


def test_features_that_do_not_fit_lose_to_those_that_do():
    large, small = option("large", size=4_000_000, room=GB), option("small", saved=0.06, room=GB)
    assert choose([large, small], 2000, 10, 0.1).kept is small
    alone = choose([large], 2000, 10, 0.1)
    assert (alone.kept, alone.share) == (large, 0.125)
    assert "room for 12%" in alone.words("memory", "fp32")
    kept = option("large", size=4_000_000, room=GB, filled=1.0)
    found = choose([kept], 2000, 10, 0.1)
    assert found.share == 1
    assert "room for" not in found.words("disk", "fp32")


def test_each_variant_is_filled_by_itself():
    one, both = option(), option(variants=2)
    first, second = (choose([one_of], 1000, 3, 0.1) for one_of in (one, both))
    assert second.whole_bytes == 2 * first.whole_bytes
    assert "2 variants" in second.words("disk", "bf16")
    # With a hundred, nearly every sample is new in each of three epochs.
    assert choose([option(variants=100)], 1000, 3, 0.1).kept is None


def test_pixels_are_kept_where_they_save_more_than_features():
    pixels = option("decoded pixels", saved=0.05, size=150_000, read=0.00001)
    features = option("features", saved=0.01, size=400_000)
    assert choose([pixels, features], 1000, 5, 0.1).kept is pixels


def test_hosts_among_which_samples_move_each_compute_all():
    one = option()
    both, parts = option(hosts=2, stays=False), option(hosts=2)
    found = [choose([given], 1000, 10, 0.1) for given in (one, both, parts)]
    assert [each.whole_bytes for each in found] == [4 * 10**8, 4 * 10**8, 2 * 10**8]
    assert "each of 2 hosts keeps all rows" in found[1].words("on disk", "bf16")
    assert "each of 2 hosts keeps the rows of its part" in found[2].words("on disk", "bf16")
    # After the first epoch a host has half of all where samples move among two.
    pays, moves = (option(read=0.03, hosts=2, stays=stays) for stays in (True, False))
    assert choose([pays], 1000, 2, 0.1).kept is pays
    assert choose([moves], 1000, 2, 0.1).kept is None
