"""Callbacks of a fit, each in a separate file."""

from flatout.train.callbacks.best_checkpoint import BestCheckpoint
from flatout.train.callbacks.callback import Callback, Figures
from flatout.train.callbacks.early_stopping import EarlyStopping
from flatout.train.callbacks.json_lines import JsonLines
from flatout.train.callbacks.loggers import Log, Logger, TensorBoard
from flatout.train.callbacks.progress import Progress
from flatout.train.callbacks.trackers import MLflow, Wandb
from flatout.train.callbacks.unfreeze import Unfreeze

__all__ = [
    "BestCheckpoint",
    "Callback",
    "EarlyStopping",
    "Figures",
    "JsonLines",
    "Log",
    "Logger",
    "MLflow",
    "Progress",
    "TensorBoard",
    "Unfreeze",
    "Wandb",
]
