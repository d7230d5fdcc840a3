"""Checkpoints, model files and export: whole or absent, and never code in a file."""

from flatout.save.checkpoint import Checkpoints, LoadedCheckpoint
from flatout.save.fits import check_fits
from flatout.save.model_file import load_model, save_model

__all__ = [
    "Checkpoints",
    "LoadedCheckpoint",
    "check_fits",
    "load_model",
    "save_model",
]
