"""bench/input.py: its keys, its files, and the checks that keep peers from skipping work."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import input_check
import input_job
import numpy as np
import pytest
from input_check import Wrong, check_images, check_rows, row_keys

import input as bench
import input_data
from restarts import PEERS, Peer, PeerFailed, Row, run_once

BENCH = Path(bench.__file__).parent


@pytest.fixture
def peers(tmp_path):
    return bench.peers(tmp_path, 0.1, [[0], [0, 1]])


@pytest.fixture
def rows_of(peers):
    """Rows in which these peers have these times in milliseconds and the others are absent."""

    def make(milliseconds):
        rows = {peer.name: Row(peer, "absent: x is not installed") for peer in peers}
        for name, times in milliseconds.items():
            row = rows[name]
            row.reason, row.seconds = "", [time / 1e3 for time in times]
            row.first_seconds = [10 * time / 1e3 for time in times]
        return rows

    return make


def keys_of(rows, cpu_counts=(1, 2)):
    return {key.name: key for key in bench.speed_keys(rows, cpu_counts)}


# -- keys ----------------------------------------------------------------------------------------


def test_every_peer_has_its_file_and_names_what_it_needs(peers):
    assert len({peer.name for peer in peers}) == len(peers)
    for peer in peers:
        assert (PEERS / peer.script).is_file()
        assert peer.needs


def test_the_keys_are_those_that_input_is_judged_by(rows_of):
    bounds = {
        "libsvm_vs_best_peer": 3,
        "libsvm_vs_tfdata": 10,
        "tfrecord_vs_tfdata": 8,
        "criteo_vs_best_peer": 5,
        "jpeg_vs_tfdata": 1.25,
        "jpeg_vs_pil_draft": 1.4,
        "memory_vs_dataloader": 15,
        "row_cache_vs_tfrecord": 1,
        "scaling_min": 1.5,
    }
    found = keys_of(rows_of({}))
    assert {name: found[name].at_least for name in bounds} == bounds
    assert found["input_us_in_memory"].at_most == 5
    assert all(key.met is not True for key in found.values())


def test_a_key_is_the_smaller_ratio_over_cpus_against_the_fastest_peer(rows_of):
    rows = rows_of(
        {
            "libsvm-flatout-1": [2, 2],
            "libsvm-flatout-2": [1, 1],
            "libsvm-polars-1": [8, 8],
            "libsvm-polars-2": [6, 6],
            "libsvm-tfdata-1": [24, 24],
            "libsvm-tfdata-2": [5, 5],
            "libsvm-tfdata-lines-1": [60, 60],
            "libsvm-tfdata-lines-2": [70, 70],
            "libsvm-flatout-again-1": [2, 2],
            "libsvm-flatout-again-2": [1.5, 1.5],
        }
    )
    found = keys_of(rows)
    assert found["libsvm_vs_best_peer"].value == pytest.approx(4)
    assert found["libsvm_vs_best_peer"].met is True
    words = "4 against libsvm-polars-1, 5 against libsvm-tfdata-2"
    assert found["libsvm_vs_best_peer"].note == words
    assert found["libsvm_vs_tfdata"].value == pytest.approx(5)
    assert found["libsvm_vs_tfdata"].met is False
    assert found["libsvm_vs_itself"].value == pytest.approx(1)


def test_flatout_is_no_peer_of_its_own(peers):
    for kind in ("libsvm", "tfrecord", "criteo", "jpeg", "memory"):
        names = bench.peer_names(kind)
        assert names
        assert not any("flatout" in name for name in names)
        assert all(f"{kind}-{name}-1" in {peer.name for peer in peers} for name in names)


def test_what_was_not_measured_meets_no_key_and_says_why(rows_of):
    found = keys_of(rows_of({"criteo-flatout-1": [1], "criteo-polars-1": [9]}))
    key = found["criteo_vs_best_peer"]
    assert key.value is None
    assert key.met is False
    assert key.found.endswith("-2: absent: x is not installed")
    on_one = keys_of(rows_of({"criteo-flatout-1": [1], "criteo-polars-1": [9]}), [1])
    assert on_one["criteo_vs_best_peer"].value == pytest.approx(9)


def test_the_row_cache_and_two_cpus_are_ratios_of_flatout_to_itself(rows_of):
    times = {f"{kind}-flatout-1": [8] for kind in ("libsvm", "tfrecord", "criteo", "jpeg")}
    times |= {f"{kind}-flatout-2": [4] for kind in ("libsvm", "tfrecord", "criteo")}
    times |= {"jpeg-flatout-2": [5], "tfrecord-flatout-cached-1": [2]}
    times |= {"tfrecord-flatout-cached-2": [2.5]}
    found = keys_of(rows_of(times))
    assert found["scaling_min"].value == pytest.approx(1.6)
    assert found["scaling_min"].note == "libsvm 2, tfrecord 2, criteo 2, jpeg 1.6"
    assert found["row_cache_vs_tfrecord"].value == pytest.approx(1.6)
    del times["criteo-flatout-2"]
    absent = keys_of(rows_of(times))["scaling_min"]
    assert absent.found == "criteo-flatout-2: absent: x is not installed"


def test_one_cpu_has_no_scaling(rows_of):
    found = keys_of(rows_of({}), [1])
    assert found["scaling_min"].found == "there is one CPU"
    assert found["scaling_min"].met is False


def test_an_own_time_below_zero_is_a_reason(rows_of):
    rows = rows_of({"memory-flatout-own-time-1": [-0.00059, 0.001]})
    key = keys_of(rows)["input_us_in_memory"]
    assert "not measured (a restart gave -0.59 us, a difference" in key.words
    assert key.met is False
    assert bench.lines(rows)
    assert bench.as_data(rows)


def test_own_time_is_in_microseconds(rows_of):
    found = keys_of(rows_of({"memory-flatout-own-time-1": [0.002, 0.003, 0.004]}))
    assert found["input_us_in_memory"].value == pytest.approx(3)
    assert found["input_us_in_memory"].met is True


def test_lines_hold_rates_first_passes_and_reasons(rows_of):
    rows = rows_of(
        {
            "libsvm-flatout-1": [1, 2, 4],
            "libsvm-polars-1": [8, 16, 32],
            "memory-flatout-own-time-1": [0.003],
        }
    )
    lines = {line[0]: line[1:] for line in bench.lines(rows)}
    polars = ["256k", "128k .. 512k", "25.6k"]
    assert lines["libsvm-polars-1"][:3] == polars
    assert lines["libsvm-polars-1"][3].startswith("8 [")
    assert lines["libsvm-flatout-1"][0] == "2.048M"
    assert lines["memory-flatout-own-time-1"][0] == "3.00 us"
    assert lines["jpeg-pil-1"] == ["", "", "", "", "absent: x is not installed"]
    data = {row["name"]: row for row in bench.as_data(rows)}
    assert set(data) == set(rows)
    assert data["libsvm-polars-1"]["time_vs_libsvm-flatout-1"]["mid"] == pytest.approx(8)
    assert data["libsvm-polars-1"]["first_seconds_per_step"] == [0.08, 0.16, 0.32]
    assert json.dumps(data)


@pytest.mark.parametrize(
    ("rows_per_second", "words"), [(4.7676e6, "4.768M"), (95561.0, "95.56k"), (504.2, "504.2")]
)
def test_rates_are_short(rows_per_second, words):
    assert bench.rate(rows_per_second) == words


def test_only_takes_the_begins_of_names(peers):
    assert bench.chosen_names(peers, []) == []
    found = bench.chosen_names(peers, ["jpeg-pil-", "memory-grain-1"])
    pillow = ["jpeg-pil-1", "jpeg-pil-2", "jpeg-pil-draft-1", "jpeg-pil-draft-2"]
    assert found == [*pillow, "memory-grain-1"]
    with pytest.raises(SystemExit, match="no peer's name begins so"):
        bench.chosen_names(peers, ["jpg"])


def test_no_files_are_made_for_peers_that_are_absent(tmp_path):
    wanted = [
        Peer("jpeg-lost-1", "input_jpeg.py", needs=("no_such_module_here",)),
        Peer("memory-here-1", "input_dataloader.py", needs=("numpy",)),
    ]
    bench.make_data(tmp_path, wanted, {"jpeg": 4, "memory": 30})
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]


def test_psnr_of_an_absent_library_is_a_reason(tmp_path):
    key = bench.psnr_key(Peer("psnr", "input_psnr.py", needs=("no_such_module_here",)))
    assert key.found == "absent: no_such_module_here is not installed"
    assert key.met is False


def test_what_checksums_take_of_an_absent_library_is_a_reason():
    keys = bench.verifying_keys(Peer("x", "input_verifying.py", needs=("no_such_module_here",)))
    assert [key.name for key in keys] == ["verifying_share", "verifying_share_in_memory"]
    assert [key.met for key in keys] == [False, None]


# -- files ---------------------------------------------------------------------------------------


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}


@pytest.mark.parametrize("kind", ["libsvm", "criteo", "memory", "jpeg"])
def test_files_are_the_same_each_time(kind, tmp_path):
    if kind == "jpeg":
        pytest.importorskip("PIL")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        input_data.make(kind, tmp_path / name / kind, 60)
    one = content(tmp_path / "one")
    assert one
    assert one == content(tmp_path / "two")


def test_clicks_have_ascending_ids_and_six_digits():
    rows = input_data.clicks(500, seed=3)
    assert rows.ids.shape == rows.values.shape == (500, 39)
    assert (np.diff(rows.ids, axis=1) > 0).all()
    assert rows.ids.min() == 1
    assert 900_000 < rows.ids.max() <= input_data.MAX_ID
    assert set(rows.labels.tolist()) == {0, 1}
    assert (rows.values[:, 13:] == 1).all()
    for number, value in zip(rows.numbers.ravel()[:200], rows.values[:, :13].ravel(), strict=False):
        assert float(f"{number:.6g}") == number
        assert np.float32(number) == value


def test_libsvm_files_hold_the_clicks(tmp_path):
    from sklearn.datasets import load_svmlight_file

    input_data.make("libsvm", tmp_path / "libsvm", 100)
    parts = sorted((tmp_path / "libsvm").glob("part-*.svm"))
    assert len(parts) == input_job.PARTS
    found = 0
    for part, path in enumerate(parts):
        matrix, labels = load_svmlight_file(str(path), dtype=np.float32, zero_based=True)
        rows = input_data.clicks(len(labels), part)
        np.testing.assert_array_equal(labels, rows.labels)
        np.testing.assert_array_equal(matrix.indices.reshape(-1, 39), rows.ids)
        np.testing.assert_array_equal(matrix.data.reshape(-1, 39), rows.values)
        keys = np.load(path.parent / f"keys-{part}.npy")
        np.testing.assert_array_equal(keys, row_keys(rows.labels, rows.ids, rows.values))
        found += len(labels)
    assert found == 100


def test_criteo_files_can_be_read_field_by_field(tmp_path):
    input_data.make("criteo", tmp_path / "criteo", 400)
    empty = fields = 0
    for part, path in enumerate(sorted((tmp_path / "criteo").glob("part-*.tsv"))):
        lines = [line.split("\t") for line in path.read_text().splitlines()]
        assert {len(line) for line in lines} == {40}
        labels = np.array([int(line[0]) for line in lines])
        numbers = np.array([[int(f or 0) for f in line[1:14]] for line in lines], np.float32)
        hashes = np.array([[int(f or "0", 16) for f in line[14:]] for line in lines])
        assert all(len(field) in (0, 8) for line in lines for field in line[14:])
        keys = np.load(path.parent / f"keys-{part}.npy")
        np.testing.assert_array_equal(keys, row_keys(labels, numbers, hashes))
        empty += sum(field == "" for line in lines for field in line)
        fields += 39 * len(lines)
    assert 0.08 < empty / fields < 0.12


def test_photographs_have_their_size_class_and_color(tmp_path):
    image = pytest.importorskip("PIL.Image")
    input_data.make("jpeg", tmp_path / "jpeg", 9)
    with np.load(tmp_path / "jpeg.npz") as known:
        counts, colors = known["counts"], known["colors"]
    assert counts.tolist() == [4, 5]
    for name, count, color in zip(input_job.CLASSES, counts, colors, strict=True):
        paths = sorted((tmp_path / "jpeg" / name).iterdir())
        assert len(paths) == count
        assert len({path.read_bytes() for path in paths}) == count
        pixels = np.stack([np.asarray(image.open(path)) for path in paths])
        assert pixels.shape[1:] == (496, 512, 3)
        np.testing.assert_allclose(pixels.mean(axis=(0, 1, 2)), color, atol=0.5)


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow writes these files")
@pytest.mark.slow
def test_tfrecord_files_hold_the_clicks(tmp_path):
    import flatout

    input_data.make("tfrecord", tmp_path / "tfrecord", 80)
    paths = sorted(map(str, (tmp_path / "tfrecord").glob("part-*.tfrecord")))
    assert len(paths) == input_job.PARTS
    batch = next(iter(flatout.data.tfrecord(paths[1:2]).batch(10).batches(0)))
    rows = input_data.clicks(10, 1)
    np.testing.assert_array_equal(batch.targets.numpy().ravel(), rows.labels)
    np.testing.assert_array_equal(batch.inputs["ids"].numpy(), rows.ids)
    np.testing.assert_array_equal(batch.inputs["values"].numpy(), rows.values)


# -- checks --------------------------------------------------------------------------------------


@pytest.fixture
def clicks():
    rows = input_data.clicks(1000, seed=0)
    return rows.labels, rows.ids, rows.values


def in_batches(columns, order):
    return [tuple(column[at] for column in columns) for at in np.array_split(order, 7)]


@pytest.fixture
def order():
    return np.random.default_rng(5).permutation(1000)


def test_all_rows_once_in_another_order_are_right(clicks, order):
    check_rows(in_batches(clicks, order), row_keys(*clicks))


def test_a_label_may_have_another_dtype_but_values_may_not(clicks, order):
    labels, ids, values = clicks
    known = row_keys(*clicks)
    check_rows(in_batches((labels.astype(np.float32), ids.astype(np.int32), values), order), known)
    with pytest.raises(Wrong, match="expected float32 values, found float64"):
        check_rows(in_batches((labels, ids, values.astype(np.float64)), order), known)


def test_rows_that_are_missing_twice_or_in_order_are_found(clicks, order):
    known = row_keys(*clicks)
    with pytest.raises(Wrong, match="expected 1,000 rows, found 999"):
        check_rows(in_batches(clicks, order[1:]), known)
    twice = order.copy()
    twice[0] = twice[500]
    with pytest.raises(Wrong, match="some rows came twice"):
        check_rows(in_batches(clicks, twice), known)
    with pytest.raises(Wrong, match="not shuffled: 100% of the rows"):
        check_rows(in_batches(clicks, np.arange(1000)), known)
    blocks = np.random.default_rng(0).permutation(10)[:, None] * 100 + np.arange(100)
    with pytest.raises(Wrong, match="not shuffled"):
        check_rows(in_batches(clicks, blocks.ravel()), known)


@pytest.mark.parametrize("column", [0, 1, 2])
def test_every_value_of_a_row_counts(clicks, order, column):
    damaged = [values.copy() for values in clicks]
    damaged[column].reshape(1000, -1)[77, -1] += 1
    with pytest.raises(Wrong, match="1 of 1,000 rows are not those of the files"):
        check_rows(in_batches(damaged, order), row_keys(*clicks))


def test_columns_that_are_swapped_or_of_another_row_are_found(clicks, order):
    labels, ids, values = clicks
    for damaged in ((labels, ids[:, ::-1], values), (labels, ids, np.roll(values, 1, axis=0))):
        with pytest.raises(Wrong, match="are not those of the files"):
            check_rows(in_batches(damaged, order), row_keys(*clicks))


def image_batches(shuffled=True, change=0, layout=(0, 1, 2, 3)):
    labels = np.repeat([0, 1], 20)
    if shuffled:
        labels = np.random.default_rng(0).permutation(labels)
    pixels = np.where(labels[:, None, None, None] == 1, 200, 100) + np.zeros((40, 8, 8, 3))
    pixels = (pixels + change).astype(np.uint8).transpose(layout)
    return [(labels[:16], pixels[:16]), (labels[16:], pixels[16:])]


@pytest.fixture
def known_images(tmp_path):
    path = tmp_path / "jpeg.npz"
    np.savez(path, counts=[20, 20], colors=[[100] * 3, [200] * 3])
    return path


def test_images_are_right_in_both_layouts(known_images):
    check_images(image_batches(change=1), known_images, 8)
    check_images(image_batches(layout=(0, 3, 1, 2)), known_images, 8)


@pytest.mark.parametrize(
    ("batches", "problem"),
    [
        (image_batches(shuffled=False), "not shuffled"),
        (image_batches(change=3), "class 0: the mean color is off by 3.0 levels"),
        (image_batches()[:1], "images of each class"),
        ([(y, x.astype(np.float32)) for y, x in image_batches()], "found float32"),
        ([(y, x[:, :7]) for y, x in image_batches()], "expected uint8 pixels 8x8x3"),
    ],
)
def test_images_that_are_wrong_are_found(known_images, batches, problem):
    with pytest.raises(Wrong, match=problem):
        check_images(batches, known_images, 8)


# -- processes -----------------------------------------------------------------------------------

HONEST = """
import sys
sys.path.append({peers!r})
import input_job
arguments = input_job.start()
images, labels = input_job.memory(arguments)
def one_pass(epoch):
    for batch in input_job.shuffled(arguments, epoch, labels, images):
        {give}
input_job.measure(arguments, lambda: one_pass)
"""


@pytest.fixture
def run_script(tmp_path):
    input_data.make("memory", tmp_path / "memory", 2000)

    def run(give):
        script = tmp_path / "peer.py"
        script.write_text(HONEST.format(peers=str(PEERS), give=give))
        cpu = min(os.sched_getaffinity(0))
        arguments = ["--data", str(tmp_path), "--kind", "memory", "--cpus", str(cpu)]
        return run_once(Peer("peer", str(script), (*arguments, "--seconds", "0.01")))

    return run


def test_a_peer_tells_its_first_pass_and_at_least_three_more(run_script):
    result = run_script("yield batch")
    assert len(result["epoch_seconds"]) >= input_job.PASSES
    assert result["first_seconds"] > 0
    assert result["steps"] == 2000 / input_job.BATCH["memory"]


@pytest.mark.parametrize(
    ("give", "problem"),
    [
        ("yield batch[0][1:], batch[1][1:]", "Wrong: expected 2,000 rows, found 1,996"),
        ("yield batch[0], batch[1] // 2", "Wrong: .* are not those of the files"),
        ("yield batch if epoch < 2 else (batch[0][1:],)", "Wrong: expected 2,000 rows in each"),
    ],
)
def test_a_peer_that_skips_work_has_failed(run_script, give, problem):
    with pytest.raises(PeerFailed, match=problem):
        run_script(give)


@pytest.mark.slow
@pytest.mark.long
def test_the_bench_runs_with_the_peers_that_are_there(tmp_path):
    chosen = ["libsvm-flatout", "libsvm-sklearn", "libsvm-polars", "criteo-flatout"]
    chosen += ["criteo-tfdata", "memory-"]
    arguments = ["--restarts", "1", "--seconds", "0.05", "--rows", "1600", "--samples", "2000"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "input.py"), *arguments, "--json", "--only", *chosen],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    for name, row in rows.items():
        if name.startswith(tuple(chosen)):
            assert row["reason"] == "" or row["reason"].startswith("absent: "), (name, row)
            assert bool(row["seconds_per_step"]) == (row["reason"] == "")
        else:
            assert row["reason"].startswith(("left out by --only", "absent: "))
    for name in ("libsvm-flatout-1", "criteo-flatout-1", "memory-flatout-1", "libsvm-sklearn-1"):
        assert rows[name]["seconds_per_step"]
        assert rows[name]["first_seconds_per_step"]
    assert found["keys"]["libsvm_vs_best_peer"] > 0
    assert found["keys"]["memory_vs_dataloader"] > 0
    assert isinstance(found["keys"]["input_us_in_memory"], float)
    assert found["keys"]["tfrecord_vs_tfdata"] is None
    assert found["details"]["jpeg_psnr"]["note"] == "left out by --only"


def test_neighbors_are_allowed_to_stay_where_there_are_few_rows():
    input_check.check_order(np.array([True, False, False]))
    with pytest.raises(Wrong, match="not shuffled: 67%"):
        input_check.check_order(np.array([True, True, False] * 50))
