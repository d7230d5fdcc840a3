"""What the benches compute themselves: keys, images, intervals, stamps."""

import sys
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest
from convnet_job import Images, load, save
from stamps import Stamps, report

import convnet
import idx_files
import startup
import trainer
import transfer
from flatout.data import idx_split
from restarts import PEERS, Row


def click_bench():
    """bench/click.py: `import click` would find the package of that name."""
    spec = spec_from_file_location("click_bench", PEERS.parent / "click.py")
    module, before = module_from_spec(spec), list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def rows_of(peers, **milliseconds):
    """Rows in which the peers named have these times and the others are absent."""
    rows = {peer.name: Row(peer, "absent: x is not installed") for peer in peers}
    for name, times in milliseconds.items():
        row = rows[name.replace("_", "-")]
        row.reason, row.seconds, row.accuracies = "", [t / 1e3 for t in times], [0.5] * len(times)
    return rows


def test_every_peer_has_its_file_and_names_what_it_needs(tmp_path):
    for peer in [
        *trainer.peers(1, 1),
        *convnet.peers(tmp_path, 1, 1),
        *transfer.peers(tmp_path, 32, 1, 1),
        *click_bench().peers(1, 1, 1, 1, 100_000_000),
    ]:
        assert (PEERS / peer.script).is_file()
        assert peer.needs


def test_the_trainer_bench_divides_times_in_the_right_direction():
    rows = rows_of(
        trainer.peers(1, 1),
        trainer=[2, 2, 2],
        trainer_captured=[2, 2, 2],
        handwritten=[1, 1, 1],
        lightning=[8, 8, 8],
        jax=[4, 4, 4],
        jax_scan=[1, 1, 1],
    )
    found = {key.name: key for key in trainer.keys(rows)}
    assert found["trainer_vs_handwritten"].value == pytest.approx(2)
    assert found["trainer_vs_handwritten"].met is False
    assert found["lightning_vs_trainer"].value == pytest.approx(4)
    assert found["lightning_vs_trainer"].met is True
    assert found["small_step_vs_jax"].value == pytest.approx(0.5)
    assert found["small_step_vs_jax"].met is True
    assert found["small_step_vs_jax_scan"].value == pytest.approx(2)
    assert found["keras_torch_vs_trainer"].value is None
    assert found["keras_torch_vs_trainer"].met is False


def test_the_transfer_bench_names_the_best_peer_of_steps_and_of_whole_runs(tmp_path):
    later = {"flatout": 1, "torch_fp32": 30, "torch_bf16": 5, "keras_tensorflow_bf16": 4}
    later |= {"flatout_second_run": 1, "flatout_memory": 3, "flatout_disk": 4}
    later |= {"flatout_head": 1, "torch_head": 200}
    rows = rows_of(transfer.peers(tmp_path, 224, 1, 1), **{k: [v, v] for k, v in later.items()})
    for name, row in rows.items():
        row.first_seconds = [2 * seconds for seconds in row.seconds]
        if name == "keras-tensorflow-bf16":
            row.first_seconds = [0.1, 0.1]
    rows["flatout-second-run"].first_seconds = [1e-3 / 0.95] * 2
    found = {key.name: key for key in transfer.speed_keys(rows, has_amx=True)}
    assert found["later_epochs_vs_plain"].value == pytest.approx(30)
    assert found["later_epochs_vs_best_peer"].value == pytest.approx(4)
    assert found["later_epochs_vs_best_peer"].note == "against keras-tensorflow-bf16"
    assert found["first_epoch_vs_plain"].value == pytest.approx(30)
    assert found["first_epoch_vs_plain"].at_least == 3.5
    assert found["five_epochs_vs_best_peer"].value == pytest.approx(5)
    assert found["five_epochs_vs_best_peer"].note.startswith("against torch-bf16")
    assert found["second_run_first_epoch_vs_later"].value == pytest.approx(0.95)
    assert found["disk_vs_memory"].value == pytest.approx(0.75)
    assert found["head_only_vs_plain"].value == pytest.approx(200)
    assert found["flatout_vs_itself"].value is None


def test_the_click_bench_divides_times_in_the_right_direction():
    click = click_bench()
    peers = click.peers(2, 40, 3, 8, 100_000_000)
    rows = rows_of(peers, flatout=[2, 2], adam=[30, 30], flatout_10m_1024=[3, 3])
    found = {key.name: key for key in click.speed_keys(rows)}
    assert found["vs_plain"].value == pytest.approx(15)
    assert found["ten_million_vs_one_million"].value == pytest.approx(1.5)
    assert found["ten_million_vs_one_million"].met is False
    assert found["vs_keras_tf"].value is None


def test_the_convnet_bench_names_the_best_peer_of_those_that_ran(tmp_path):
    rows = rows_of(
        convnet.peers(tmp_path, 1, 1),
        flatout=[2, 2],
        flatout_again=[1, 1],
        torch_fp32=[10, 10],
        keras_tensorflow_bf16=[3, 3],
        keras_jax_bf16=[5, 5],
    )
    found = {key.name: key for key in convnet.speed_keys(rows)}
    assert found["vs_plain_torch"].value == pytest.approx(5)
    assert found["vs_best_peer"].value == pytest.approx(1.5)
    assert found["vs_best_peer"].note == "against keras-tensorflow-bf16, the best of 3 of 10 peers"
    assert found["flatout_vs_itself"].value == pytest.approx(0.5)


def test_the_convnet_bench_without_peers_says_so(tmp_path):
    rows = rows_of(convnet.peers(tmp_path, 1, 1), flatout=[2, 2])
    found = {key.name: key for key in convnet.speed_keys(rows)}
    assert found["vs_best_peer"].found == "no peer ran"
    assert found["vs_plain_torch"].found == "torch-fp32: absent: x is not installed"


def test_the_convnet_bench_has_each_peer_in_both_precisions(tmp_path):
    names = {peer.name for peer in convnet.peers(tmp_path, 1, 1)}
    kinds = ["torch", "lightning", "keras-torch", "keras-tensorflow", "keras-jax"]
    assert names == {"flatout", "flatout-again"} | {
        f"{kind}-{precision}" for kind in kinds for precision in ("fp32", "bf16")
    }


def test_accuracies_differ_by_their_means():
    key = convnet.same_accuracy([0.98, 0.99, 0.97], [0.985, 0.981, 0.98])
    assert key.value == pytest.approx(0.002)
    assert "plain 98.00% (98.00% 99.00% 97.00%), Flatout 98.20%" in key.note
    assert convnet.same_accuracy([0.9], [0.91]).met is False
    assert convnet.same_accuracy([0.91], [0.9]).value == pytest.approx(0.01)


def test_made_up_images_are_the_same_for_a_seed_and_can_be_told_apart():
    images, labels = convnet.made_up(400, 1)
    again = convnet.made_up(400, 1)
    assert images.shape == (400, 28, 28)
    assert images.dtype == np.float32
    assert labels.dtype == np.int64
    assert images.min() >= 0
    assert images.max() <= 1
    np.testing.assert_array_equal(images, again.images)
    centers = np.stack([images[labels == c].mean(axis=0) for c in range(10)])
    fresh, truth = convnet.made_up(100, 2)
    distances = ((fresh[:, None] - centers) ** 2).sum(axis=(2, 3))
    assert (distances.argmin(axis=1) == truth).mean() > 0.9


def test_repeated_images_start_again():
    few = Images(np.arange(3.0).reshape(3, 1, 1), np.array([5, 6, 7]))
    assert convnet.repeated(few, 7).labels.tolist() == [5, 6, 7, 5, 6, 7, 5]
    assert convnet.repeated(few, 2).images.ravel().tolist() == [0, 1]


def test_images_survive_the_way_to_a_peer(tmp_path):
    train, held_out = convnet.made_up(6, 1), convnet.made_up(4, 2)
    save(tmp_path / "images.npz", train, held_out)
    for sent, got in zip((train, held_out), load(tmp_path / "images.npz"), strict=True):
        np.testing.assert_array_equal(sent.images, got.images)
        np.testing.assert_array_equal(sent.labels, got.labels)


def test_idx_files_become_pixels_from_0_to_1(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (2010, 28, 28), dtype=np.uint8)
    labels = np.arange(2010, dtype=np.uint8) % 10
    idx_files.write(tmp_path / "t10k-images-idx3-ubyte.gz", pixels)
    idx_files.write(tmp_path / "t10k-labels-idx1-ubyte.gz", labels)
    train, held_out = map(convnet.from_idx, idx_split(tmp_path))
    np.testing.assert_allclose(train.images, pixels[:10] / 255.0, rtol=1e-6)
    assert train.images.dtype == np.float32
    assert held_out.labels.tolist() == labels[10:].tolist()


def test_idx_files_of_another_size_are_refused(tmp_path):
    idx_files.write(tmp_path / "t10k-images-idx3-ubyte", np.zeros((2010, 8, 8), np.uint8))
    idx_files.write(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(2010, np.uint8))
    train, _ = idx_split(tmp_path)
    with pytest.raises(SystemExit, match=r"expected images of 28x28, found \(8, 8\)"):
        convnet.from_idx(train)


def test_the_first_stamp_starts_the_clock(tmp_path):
    stamps = Stamps()
    stamps.readings = [10.0, 12.0, 15.0]
    assert stamps.epoch_seconds() == [2.0, 3.0]
    stamps.mark()
    assert len(stamps.epoch_seconds()) == 3
    report(tmp_path / "out.json", stamps, steps=4, accuracy=0.5)
    assert '"steps": 4' in (tmp_path / "out.json").read_text()


def test_startup_times_real_processes_and_reports_what_is_absent(tmp_path):
    wanted = {
        "nothing": [sys.executable, "-c", "pass"],
        "sleep": [sys.executable, "-c", "import time; time.sleep(0.2)"],
        "lost": [str(tmp_path / "flatout"), "--help"],
        "broken": [sys.executable, "-c", "import no_such_module_here"],
    }
    found = startup.time_in_turn(wanted, rounds=2)
    assert len(found["nothing"]) == 2
    assert min(found["sleep"]) >= 200
    assert found["lost"] == "absent: flatout is not installed"
    assert found["broken"].startswith("failed: ModuleNotFoundError")
    assert [line[0] for line in startup.lines(found)] == list(wanted)


def test_startup_takes_differences_within_rounds():
    found = {
        startup.PYTHON: [10.0, 30.0, 20.0],
        startup.AGAIN: [10.0, 30.0, 20.0],
        startup.IMPORT: [15.0, 34.0, 26.0],
        startup.HELP: "absent: flatout is not installed",
    }
    keys = {key.name: key for key in startup.keys(found)}
    assert keys["import_ms"].value == 5.0
    assert keys["import_ms"].found.low == 4.0
    assert keys["import_ms"].found.high == 6.0
    assert keys["import_ms"].met is True
    assert keys["help_ms"].met is False
    assert keys["python_less_itself_ms"].value == 0.0
