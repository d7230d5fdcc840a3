"""Network figures: what is read, what is refused, and rates and times as people write them."""

import json

import pytest

from flatout.errors import FlatoutError
from flatout.forecast import Network, parse_network, parse_rate, parse_seconds

GOOD = {
    "schema": 1,
    "hosts": ["a", "b"],
    "links": [{"between": ["a", "b"], "rtt_s": 2e-4, "bytes_per_s": 1.1e9}],
    "collectives": [
        {
            "op": "all_reduce",
            "reduction": "ring",
            "ranks": 2,
            "hosts": 2,
            "bytes": 26214400,
            "seconds": [0.03, 0.031],
        }
    ],
}


def test_a_file_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "network.json"
    found = Network.model_validate(GOOD)
    found.write(file)
    assert json.loads(file.read_text())["schema"] == 1
    assert Network.read(file) == found == parse_network(str(file))
    assert found.links[0].bytes_per_s == 1.1e9


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"schema": 2}, "schema"),
        ({"links": [{**GOOD["links"][0], "between": ["a", "c"]}]}, "'c'"),
        ({"links": [], "collectives": []}, "neither"),
        ({"links": [{**GOOD["links"][0], "rtt_s": 0}]}, "rtt_s"),
        ({"more": 1}, "more"),
    ],
)
def test_what_is_no_such_file_is_named(tmp_path, changes, named):
    file = tmp_path / "network.json"
    file.write_text(json.dumps({**GOOD, **changes}))
    with pytest.raises(FlatoutError) as error:
        Network.read(file)
    assert named in str(error.value)
    assert str(file) in str(error.value)
    file.unlink()
    with pytest.raises(FlatoutError, match="cannot read network figures"):
        parse_network(str(file))


def test_rates_count_bits_or_bytes():
    assert parse_rate("10Gb") == parse_network("10 Gbit/s") == 1.25e9
    assert parse_rate("100MB/s") == 1e8
    for text in ("10", "Gb", "0Gb", "-1Gb", "10Gx"):
        with pytest.raises(FlatoutError, match="expected a rate"):
            parse_rate(text)


def test_times_have_a_unit():
    assert [parse_seconds(text) for text in ("0.2ms", "2h", "30min", "50us")] == [
        pytest.approx(2e-4), 7200, 1800, pytest.approx(5e-5)
    ]  # fmt: skip
    with pytest.raises(FlatoutError, match="expected a time"):
        parse_seconds("2")
