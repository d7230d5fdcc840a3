"""Forecasts from runs whose truth is known, what is decided of them, and what bad input gets."""

import json
from dataclasses import replace

import pytest
import torch
from forecast_runs import make_run, on_cpu, profile, seconds_of, truth
from torch import nn
from typer.testing import CliRunner

import flatout
from flatout.cli.main import app
from flatout.errors import FlatoutError
from flatout.forecast import Forecast, ForecastOptions, Network, Prices, parse_settings
from flatout.forecast.decisions import decisions
from flatout.forecast.job import Shape
from flatout.measure import Profile
from flatout.measure.profile import RanksOnHost, StepTimes

LINE = 1.25e9
PRICES = Prices((("g5", 1.0),), "USD")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of 1 rank, and of 2 on as many hosts."""
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "one"), make_run(folder / "two", 2, hosts=2)


def forecast(runs, **asked):
    return Forecast.of(runs, ForecastOptions(**{"network": LINE, "keeps_rank_batch": True} | asked))


def decided(found, about):
    return next(one for one in decisions(found) if one.about == about)


def command(*words):
    return CliRunner().invoke(app, ["forecast", *map(str, words)])


@pytest.mark.parametrize("line", [2e7, 1.25e11])
def test_measured_steps_outweigh_a_given_network(tmp_path, runs, line):
    two = seconds_of(Shape(2, 1, 64))
    (side,) = forecast(runs, hosts=(1, 2, 4), network=line).sides
    rates = {point.hosts: point.rate for point in side.points}
    assert rates[2].middle == pytest.approx(128 / two, rel=0.05)
    assert rates[4].low < 256 / seconds_of(Shape(4, 1, 64)) < rates[4].high
    assert f"2 hosts took {two * 1e3:.3g}"[:14] in side.contradiction
    shown = command(*runs, "--hosts", "1,2,4", "--network", f"{line:.0f}B", "--keep-rank-batch")
    assert "the forecast uses the measured steps" in " ".join(shown.stdout.split())
    (agreeing,) = forecast(runs, hosts=(1, 2, 4)).sides
    assert agreeing.contradiction == ""


@pytest.mark.parametrize("keeps_rank_batch", [False, True])
def test_the_truth_of_more_hosts_lies_within_the_interval(runs, keeps_rank_batch):
    for known in (runs[:1], runs):
        found = forecast(known, hosts=(1, 2, 4, 8), keeps_rank_batch=keeps_rank_batch)
        (side,) = found.sides
        for point in side.points:
            exact = point.shape.samples / seconds_of(point.shape)
            assert point.rate.low < exact < point.rate.high
        assert side.points[0].rate.middle == pytest.approx(64 / 0.2, rel=0.02)
    # Four times two ranks is no range, eight times one is.
    assert not side.points[-1].is_range
    (alone,) = forecast(runs[:1], hosts=(4, 8), keeps_rank_batch=True).sides
    assert [point.is_range for point in alone.points] == [False, True]
    narrow, wide = side.points[2].rate, alone.points[0].rate
    assert narrow.high / narrow.low < wide.high / wide.low


def test_a_batch_that_all_share_gets_less_for_each(runs):
    shared, kept = (
        forecast(runs[:1], hosts=(1, 4), keeps_rank_batch=kept).sides[0].points[1]
        for kept in (False, True)
    )
    assert shared.shape.batch == 16
    assert kept.shape.batch == 64
    assert shared.efficiency.middle < kept.efficiency.middle


def test_what_was_measured_besides_narrows_the_forecast(tmp_path, runs):
    """Of two batch sizes, and of ranks beside each other."""
    times = [
        StepTimes(batch, [seconds_of(Shape(1, 1, batch, silent=True))] * 9)
        for batch in (64, 32, 16)
    ]
    beside = [RanksOnHost(n, 64, [seconds_of(Shape(1, n, 64, silent=True))] * 9) for n in (1, 2, 4)]
    run = make_run(tmp_path / "more", step_times=times, ranks_on_host=beside)

    def width(run, **asked):
        rate = forecast([run], **asked).sides[0].points[-1].rate
        assert rate.low < 64 * asked["per_host"] / seconds_of_asked < rate.high
        return rate.high / rate.low

    seconds_of_asked = seconds_of(Shape(1, 4, 64))
    asked = {"hosts": (1,), "per_host": 4}
    assert width(run, **asked) < width(runs[0], **asked)
    slow = forecast([run], hosts=(1, 4), network=LINE / 50, keeps_rank_batch=False)
    assert not {one.choice for one in decisions(slow) if one.about == "narrow"} & {"batch", "host"}
    less = forecast([run], hosts=(4,), keeps_rank_batch=False).sides[0]
    more = forecast(runs[:1], hosts=(4,), keeps_rank_batch=False).sides[0]
    assert less.draws.fixed.std() < 0.7 * more.draws.fixed.std()


def test_a_measured_network_narrows_the_forecast(runs):
    link = {"between": ("a", "b"), "rtt_s": 2e-4, "bytes_per_s": 0.62 * LINE}
    shape = Shape(2, 1, 64)
    assert seconds_of(shape) > 0.2
    network = Network.model_validate({"schema": 1, "hosts": ["a", "b"], "links": [link]})
    given, known = (
        forecast(runs[:1], hosts=(4,), network=one).sides[0].points[0].rate
        for one in (LINE, network)
    )
    exact = 256 / seconds_of(Shape(4, 1, 64))
    assert known.low < exact < known.high
    assert known.high / known.low < given.high / given.low


def test_a_total_of_storage_holds_all_hosts_back(runs):
    # 1,000 bytes a sample: 500 samples per second for all, where a host alone makes 320.
    one, four = forecast(runs[:1], hosts=(1, 4), storage=5e5).sides[0].points
    assert one.rate.middle == pytest.approx(320, rel=0.03)
    assert 380 < four.rate.middle < 510
    assert four.terms["input"] > 0


def test_hosts_are_chosen_by_efficiency_time_and_money(runs):
    asked = {"hosts": (1, 2, 4, 8), "prices": PRICES, "epochs": 9}
    found = forecast(runs, **asked, deadline=3 * 3600.0, budget=6.0)
    points = {point.hosts: point for point in found.sides[0].points}
    # Nine epochs of 640,000 samples take a host five hours, and 5 USD.
    assert points[1].seconds.middle == pytest.approx(5 * 3600, rel=0.03)
    assert points[1].cost.middle == pytest.approx(5.0, rel=0.03)
    timely = [n for n, point in points.items() if point.seconds.middle <= 3 * 3600]
    cheapest = min(timely, key=lambda n: points[n].cost.middle)
    assert decided(found, "deadline").choice == cheapest
    paid = [n for n, point in points.items() if point.cost.middle <= 6]
    fastest = max(paid, key=lambda n: points[n].rate.middle)
    assert decided(found, "budget").choice == fastest
    strict = forecast(runs, **asked, efficiency=1.0)
    assert decided(strict, "hosts").choice == 1
    assert decided(forecast(runs, **asked, efficiency=0.1), "hosts").choice == 8
    none = forecast(runs, **asked, deadline=60.0)
    assert decided(none, "deadline").choice is None


@pytest.mark.parametrize(
    ("given", "choice", "said"),
    [
        ({"busy": 0.6}, "stay", "60% busy"),
        ({}, "devices", "1 of 4 GPUs"),
        ({"waits": 60.0, "busy": 0.7}, "stay", "input waits 23%"),
        ({"ranks": 4}, "hosts", "last of 4 gives"),
    ],
)
def test_the_path_is_one_device_then_more_then_hosts(tmp_path, given, choice, said):
    waits = given.pop("waits", 0.0)
    made = profile(tmp_path / "run", **given)
    if waits:
        lanes = made.ranks[0].lanes_ms | {"input": waits}
        made = replace(made, ranks=[replace(made.ranks[0], lanes_ms=lanes)])
    (tmp_path / "run").mkdir()
    made.write(tmp_path / "run")
    found = forecast([str(tmp_path / "run")], hosts=(1, 2, 4), network=10 * LINE)
    one = decided(found, "path")
    assert one.choice == choice
    assert said in one.words


def test_what_lanes_and_buckets_tell(tmp_path, runs):
    """On a GPU it is the host that says when buckets are ready, so that nothing is made of it."""
    buckets = [{"bytes": 1_000_000, "ready_ms": 30.0}, {"bytes": 2_000_000, "ready_ms": 120.0}]
    made = profile(tmp_path / "gpu", 2, communication={"buckets": buckets}, state="running")
    for name, one in (("gpu", made), ("cpu", on_cpu(made))):
        (tmp_path / name).mkdir()
        one.write(tmp_path / name)
    gpu, cpu = (
        forecast([str(tmp_path / name)], network=None).sides[0].measured for name in ("gpu", "cpu")
    )
    assert [bucket.ready for bucket in gpu.job.buckets] == [0.5, 1.0]
    assert [bucket.ready for bucket in cpu.job.buckets] == [0.3, 1.0]
    assert gpu.job.bytes == cpu.job.bytes == 3e6
    assert gpu.job.backward == cpu.job.backward == pytest.approx(0.5)
    assert gpu.prior.fixed[0] == cpu.prior.fixed[0] == pytest.approx(0.05)
    assert (gpu.job.reduction, cpu.job.reduction) == ("nccl", "shared")
    assert "had not ended: as of step 400" in gpu.notes[-1]


def test_of_local_sgd_only_the_average_grows(tmp_path):
    made = profile(tmp_path / "run", 2, hosts=2, communication={"bytes_per_average": 5e7})
    made = replace(
        made,
        steps=replace(made.steps, step_ms=[300.0] * 100),
        world=made.world | {"strategy": "local_sgd"},
        recipe=made.recipe | {"values": {"world.sync_every": 8}},
    )
    (tmp_path / "run").mkdir()
    made.write(tmp_path / "run")
    (side,) = forecast([str(tmp_path / "run")], hosts=(2, 4)).sides
    assert side.measured.job.averaged == 5e7
    two, four = side.points
    assert two.rate.middle == pytest.approx(2 * 64 / 0.3, rel=0.03)
    assert 1.7 < four.rate.middle / two.rate.middle < 2.01


def test_cpu_or_gpu_in_time_and_in_money(tmp_path, runs):
    cpu = on_cpu(profile(tmp_path / "cpu", seconds=1.0))
    (tmp_path / "cpu").mkdir()
    cpu.write(tmp_path / "cpu")
    prices = Prices((("g5", 1.0), ("c5", 0.1)), "USD")
    found = forecast([runs[0], str(tmp_path / "cpu")], prices=prices, network=None)
    assert decided(found, "device").choice == "g5"
    assert decided(found, "device").number == pytest.approx(5.0, rel=0.05)
    # Five times slower, and a tenth of the price.
    assert decided(found, "money").choice == "c5"
    assert not [one for one in decisions(forecast(runs)) if one.about == "device"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_profiles_of_runs_on_a_cpu_and_a_gpu_decide(tmp_path):
    x = torch.randn(640, 512)
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10))
        trainer = flatout.Trainer(
            model,
            loss="cross_entropy",
            recipe=flatout.Recipe(world={"device": device}),
            allow="exact",
            run=tmp_path / device,
            say=lambda line: None,
        )
        trainer.fit((x, torch.arange(640) % 10), batch_size=16, epochs=2, progress=False)
    rank = Profile.read(tmp_path / "cuda").ranks[0]
    assert rank.device.startswith("cuda")
    assert rank.machine["gpus"]
    assert rank.use["gpu"]
    assert rank.use["gpu_memory_bytes"]
    found = Forecast.of([str(tmp_path / "cpu"), str(tmp_path / "cuda")], ForecastOptions())
    assert [side.measured.device for side in found.sides] == ["cpu", "cuda"]
    assert decided(found, "device").choice in ("the CPU", "the GPU")


def test_the_network_is_named_where_it_holds_back(runs):
    found = forecast(runs[:1], hosts=(1, 4), network=LINE / 50, keeps_rank_batch=False)
    assert decided(found, "held back").choice == "gradient sync"
    assert decided(found, "settings").choice == "compression=bf16"
    assert decided(found, "settings").number > 1.3
    assert decided(found, "narrow").choice == "network"
    assert decided(found, "path").choice == "devices"
    assert decided(found, "servers").choice == "all_reduce"
    faster = forecast(
        runs[:1], hosts=(4,), network=LINE / 50, settings={"world.compression": "bf16"}
    )
    plain = forecast(runs[:1], hosts=(4,), network=LINE / 50)
    assert faster.sides[0].points[0].rate.middle > 1.3 * plain.sides[0].points[0].rate.middle


def test_servers_that_compute_nothing_stay_on_hosts_of_their_own(tmp_path):
    made = profile(tmp_path, 4, hosts=4)
    world = made.world | {"strategy": "parameter_server", "servers_apart": 2}
    values = {"world.servers": 2, "world.staleness": "sync"}
    for staleness, served in (("sync", "towers"), (4, "apart")):
        recipe = {"summary": "", "values": values | {"world.staleness": staleness}, "reasons": {}}
        replace(made, world=world, recipe=recipe).write(tmp_path)
        found = forecast([str(tmp_path)], hosts=(4, 8))
        job = found.sides[0].measured.job
        assert (job.served, job.servers) == (served, 2)
        decision = next(one for one in decisions(found) if one.about == "servers")
        assert decision.words.endswith("at 8 hosts, 2 more hosts with a server each")
    named = forecast([str(tmp_path)], settings={"world.strategy": "parameter_server"})
    assert named.sides[0].measured.job.served == "ranks"


def test_bad_input_is_named(tmp_path, runs):
    one = runs[0]
    summed = {"op": "all_reduce", "ranks": 2, "hosts": 1, "bytes": 4096, "seconds": [1e-4]}
    alone = Network.model_validate({"schema": 1, "hosts": ["a"], "collectives": [summed]})
    cases = [
        (lambda: forecast([one], hosts=(2,), network=None), "without the network"),
        (lambda: forecast([one], hosts=(2,), network=alone), "of a alone"),
        (lambda: forecast([one, one]), "named twice"),
        (lambda: forecast([one], hosts=(128,), keeps_rank_batch=False), "more than the 64 samples"),
        (lambda: forecast([one], budget=3.0), "prices"),
        (
            lambda: forecast([one], prices=Prices((("a", 1.0), ("b", 1.0)), "EUR")),
            "a price for each",
        ),
        (lambda: Prices.parse("c5=0.68", None), "currency"),
        (lambda: Prices.parse("c5=0.68", "dollars"), "three capital letters"),
        (lambda: Prices.parse("c5=cheap", "USD"), "c5=cheap"),
        (lambda: Prices.parse(str(tmp_path / "none.toml"), None), "cannot read prices"),
        (lambda: parse_settings(["world.strategy=staged"]), "not forecast"),
        (lambda: parse_settings(["compute.precision=bf16"]), "not forecast"),
    ]
    model = {"name": "Other", "parameters": 1, "trained": 1}
    other = make_run(tmp_path / "other", model=model)
    cases.append((lambda: forecast([one, other]), "other models"))
    short = profile(tmp_path / "short")
    steps = replace(short.steps, step_ms=short.steps.step_ms[:20])
    short = make_run(tmp_path / "short", steps=steps)
    cases.append((lambda: forecast([short]), "30 steady steps"))
    staged = make_run(tmp_path / "staged", 2, world=profile("x", 2).world | {"strategy": "staged"})
    cases.append((lambda: forecast([staged]), "staged"))
    for ask, said in cases:
        with pytest.raises(FlatoutError, match=said):
            ask()


def test_prices_come_from_a_file_with_its_currency(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text('currency = "EUR"\n[prices]\n"c5.4xlarge" = 0.68\n')
    assert Prices.parse(str(file), None) == Prices((("c5.4xlarge", 0.68),), "EUR")
    assert Prices.parse(str(file), "USD").currency == "USD"
    for text, said in (("[prices", "TOML"), ('currency = "EUR"', "a table of prices")):
        file.write_text(text)
        with pytest.raises(FlatoutError, match=said):
            Prices.parse(str(file), None)


def test_the_command_fits_eighty_columns_and_says_what_json_says(tmp_path, runs):
    words = [runs[0], "--hosts", "1..16", "--network", "10Gb", "--rtt", "0.2ms", "--deadline", "3h"]
    words += ["--price", "g5=98765.4", "--currency", "USD", "--epochs", "9", "--keep-rank-batch"]
    shown = command(*words)
    assert shown.exit_code == 0, shown.exception
    assert shown.stderr == ""
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in shown.stdout
    assert "network given, not measured: TCP at 0.45 to 0.75 of line rate" in " ".join(lines)
    data = json.loads(command(*words, "--json").stdout)
    (side,) = data["sides"]
    assert [row["hosts"] for row in side["hosts"]] == [1, 2, 4, 8, 16]
    assert [row["samples_per_s"][1] is None for row in side["hosts"]] == [False] * 3 + [True] * 2
    assert data["currency"] == "USD"
    assert {"path", "hosts", "deadline", "held back"} <= {one["about"] for one in data["decisions"]}
    (tmp_path / "profile.json").write_text('{"schema": "flatout.profile", "version": 9}')
    refused = command(tmp_path)
    assert refused.exit_code == 1
    assert "version 9" in str(refused.exception)
    assert "expected numbers of hosts" in str(command(runs[0], "--hosts", "4..1").exception)


def test_truth_of_these_tests_saturates():
    """Else they would not tell a model that says linear from one that does not."""
    slow = truth(nic=2e7)
    assert seconds_of(Shape(4, 1, 64), slow) > 5 * seconds_of(Shape(1, 1, 64), slow)
