"""MLflow and Weights & Biases: figures of a fit in an experiment tracker.

Both log to the tracker's run that the script has begun, and leave it open. Without such a run, they
begin a run, and end it with the fit. With several ranks, only the first rank logs. Neither library
is imported before a fit begins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import ModelError
from flatout.train.callbacks.loggers import Log, Logger

if TYPE_CHECKING:
    from flatout.train.state import FitState


class _Tracked(Log):
    """Sends figures of the first rank to a tracker."""

    logger: _Run

    def __init__(self, run: _Run, every: int) -> None:
        super().__init__(run, every)
        self._is_on = False

    def on_fit_start(self, state: FitState) -> None:
        super().on_fit_start(state)
        self._is_on = state.trainer.loop.world.is_first
        if not self._is_on:
            return
        try:
            self.logger.begin(_settings(state))
        except OSError as error:
            self._give_up(error)

    def on_step(self, state: FitState) -> None:
        if self._is_on:
            super().on_step(state)

    def on_epoch_end(self, state: FitState) -> None:
        if self._is_on:
            super().on_epoch_end(state)

    def on_fit_error(self, state: FitState, error: BaseException) -> None:
        self.logger.failed = True
        super().on_fit_error(state, error)


class MLflow(_Tracked):
    """Logs to MLflow. Needs `pip install 'flatout[mlflow]'`.

    The parameters of the run are the Recipe in one line, model, batch size, epochs and ranks.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        every: int = 50,
    ) -> None:
        _check_installed("mlflow", "MLflow", "mlflow")
        super().__init__(_MLflowRun(experiment, run_name, tracking_uri, run_id), every)


class Wandb(_Tracked):
    """Logs to Weights & Biases. Needs `pip install 'flatout[wandb]'`.

    The config of the run is the Recipe in one line, model, batch size, epochs and ranks.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        mode: str | None = None,
        run_id: str | None = None,
        every: int = 50,
    ) -> None:
        _check_installed("wandb", "Wandb", "wandb")
        options: dict[str, Any] = {"project": project, "name": name, "mode": mode, "id": run_id}
        if folder is not None:
            options["dir"] = os.fspath(folder)
        if run_id is not None:
            options["resume"] = "allow"
        super().__init__(_WandbRun(options), every)


class _Run(Logger):
    """A run of a tracker.

    Attributes:
        failed: whether the fit has failed.
    """

    failed = False

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Use the run that the script has begun, or begin one."""


class _MLflowRun(_Run):
    def __init__(self, experiment: Any, run_name: Any, tracking_uri: Any, run_id: Any) -> None:
        self._experiment, self._run_name = experiment, run_name
        self._tracking_uri, self._run_id = tracking_uri, run_id
        self._own = False
        self._id: str | None = None

    def begin(self, settings: Mapping[str, Any]) -> None:
        mlflow = import_module("mlflow")
        self.failed = False
        try:
            active = mlflow.active_run()
            self._own = active is None
            if active is None:
                uri = self._tracking_uri or _folder_for(mlflow)
                if uri is not None:
                    mlflow.set_tracking_uri(uri)
                if self._experiment is not None:
                    mlflow.set_experiment(self._experiment)
                active = mlflow.start_run(run_id=self._run_id, run_name=self._run_name)
            self._id = active.info.run_id
            if self._run_id is None:  # parameters of an existing run cannot change
                mlflow.log_params(dict(settings))
        except mlflow.exceptions.MlflowException as error:
            raise OSError(str(error)) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        mlflow = import_module("mlflow")
        try:
            mlflow.log_metrics(dict(values), step=step, run_id=self._id)
        except mlflow.exceptions.MlflowException as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        if not self._own:
            return
        self._own = False
        mlflow = import_module("mlflow")
        try:
            mlflow.end_run("FAILED" if self.failed else "FINISHED")
        except mlflow.exceptions.MlflowException as error:
            raise OSError(str(error)) from error


def _folder_for(mlflow: Any) -> str | None:
    """Return the folder mlruns if MLflow's default is a database and SQLAlchemy is missing."""
    is_default = not mlflow.is_tracking_uri_set()
    is_database = mlflow.get_tracking_uri().startswith("sqlite:")
    if not (is_default and is_database) or find_spec("sqlalchemy"):
        return None
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 requires it
    return Path("mlruns").absolute().as_uri()


class _WandbRun(_Run):
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._run: Any = None
        self._own = False

    def begin(self, settings: Mapping[str, Any]) -> None:
        wandb = import_module("wandb")
        self.failed = False
        try:
            self._own = wandb.run is None
            self._run = wandb.init(**self._options) if self._own else wandb.run
            self._run.config.update(dict(settings), allow_val_change=True)
        except wandb.Error as error:
            raise OSError(str(error)) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        wandb = import_module("wandb")
        try:
            self._run.log(dict(values), step=step)
        except wandb.Error as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        if not self._own:
            return
        self._own = False
        wandb = import_module("wandb")
        try:
            self._run.finish(exit_code=int(self.failed))
        except wandb.Error as error:
            raise OSError(str(error)) from error


def _settings(state: FitState) -> dict[str, Any]:
    recipe = state.trainer.resolved
    return {
        "recipe": "" if recipe is None else recipe.summary(),
        "model": type(state.trainer.model).__name__,
        "batch_size": state.batch_size,
        "epochs": state.epochs,
        "ranks": state.trainer.loop.world.size,
    }


def _check_installed(module: str, callback: str, extra: str) -> None:
    if find_spec(module) is None:
        raise ModelError(
            f"the {callback} callback needs {module}", do=f"pip install 'flatout[{extra}]'"
        )
