"""The callbacks of MLflow and Weights & Biases, with the libraries themselves, on this machine."""

import os
import sys
import textwrap
from importlib.util import find_spec

import pytest
from train_jobs import StopAt, data, network, quiet

import flatout
import forked
from flatout.errors import ModelError
from flatout.train.callbacks import MLflow, Wandb

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def fit(*callbacks, epochs=2):
    trainer = flatout.Trainer(network(), allow="exact", say=quiet)
    return trainer.fit(
        data(), batch_size=32, epochs=epochs, callbacks=list(callbacks), progress=False
    )


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_URI"):  # MLflow sets them for children
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    library = pytest.importorskip("mlflow")
    library.set_tracking_uri((tmp_path / "mlruns").as_uri())
    library.set_experiment("tests")  # else it would look for that of an earlier test
    yield library
    while library.active_run() is not None:
        library.end_run()


def test_mlflow_gets_figures_settings_and_how_it_ended(mlflow, tmp_path):
    history = fit(MLflow("tests", run_name="one", every=2))
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "one")
    assert run.data.params["model"] == "Sequential"
    assert run.data.params["batch_size"] == "32"
    assert run.data.metrics["epoch/loss"] == pytest.approx(history.epochs[-1]["loss"])
    steps = [one.step for one in client.get_metric_history(run.info.run_id, "step/loss")]
    assert steps == [2, 4, 6, 8, 10]
    with pytest.raises(ZeroDivisionError):
        fit(MLflow("tests", run_name="two"), StopAt(3, lambda state: 1 / 0))
    found = client.search_runs([run.info.experiment_id])
    assert {one.info.run_name: one.info.status for one in found}["two"] == "FAILED"


def test_a_run_of_the_scripts_own_is_taken_and_left_open(mlflow):
    with mlflow.start_run() as own:
        fit(MLflow(every=5))
        assert mlflow.active_run().info.run_id == own.info.run_id
        fit(MLflow(every=5))  # a second fit with the same settings is no contradiction
    run = mlflow.MlflowClient().get_run(own.info.run_id)
    assert run.data.metrics["epoch/loss"] > 0


def test_a_tracker_that_cannot_be_reached_is_warned_of_and_training_goes_on(mlflow, monkeypatch):
    def refuse(*args, **kwargs):
        raise mlflow.exceptions.MlflowException("no room")

    monkeypatch.setattr(mlflow, "log_metrics", refuse)
    with pytest.warns(UserWarning, match="training goes on without it: no room"):
        history = fit(MLflow("tests"))
    assert len(history.epochs) == 2


def test_wandb_offline_keeps_a_run_here(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # wandb replaces it
    fit(Wandb("tests", folder=tmp_path, mode="offline", every=2))
    assert wandb.run is None
    wandb.teardown()  # its service writes the last of it
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    logged = file.read_bytes()
    for words in (b"step/loss", b"epoch/loss", b"batch_size", b"Sequential"):
        assert words in logged


@pytest.mark.parametrize(("name", "make"), [("mlflow", MLflow), ("wandb", Wandb)])
def test_without_the_library_the_error_tells_how_to_install_it(name, make, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelError, match=rf"pip install 'flatout\[{name}\]'"):
        make()


def test_mlflow_as_the_page_has_it_needs_no_more_than_is_installed(tmp_path):
    """Run with mlflow-skinny, which the extra installs and which has no database."""
    if find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed")
    script = """
    import torch, flatout
    from flatout.train.callbacks import MLflow
    x = torch.randn(64, 4)
    trainer = flatout.Trainer(torch.nn.Linear(4, 1), loss="mse", allow="exact")
    trainer.fit((x, x[:, :1]), batch_size=8, epochs=2, callbacks=[MLflow("tables")], progress=False)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    unset = ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_TRACKING_URI")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = forked.run(["train.py"], tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    found = [*tmp_path.glob("mlruns/*/*/metrics/*"), *tmp_path.glob("mlflow.db")]
    assert found
