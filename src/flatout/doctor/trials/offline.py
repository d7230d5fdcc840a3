"""Environment that keeps loggers and hubs offline, and makes them write to a trial's own folder.

Settings in a script's code (`wandb.init(mode="online")`) override the environment. Then guard.py
refuses the connection.
"""

from __future__ import annotations

from pathlib import Path


def offline(folder: Path) -> dict[str, str]:
    """Return variables to add to the environment of a trial's process."""
    logs = str(folder / "logs")
    return {
        "WANDB_MODE": "offline",
        "WANDB_DIR": logs,
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"file:{logs}/mlflow",
        "MLFLOW_REGISTRY_URI": f"file:{logs}/mlflow",
        "COMET_MODE": "offline",
        "COMET_START_ONLINE": "0",
        "COMET_OFFLINE_DIRECTORY": logs,
        "NEPTUNE_MODE": "offline",
        "NEPTUNE_DATA_DIRECTORY": f"{logs}/neptune",
        "CLEARML_OFFLINE_MODE": "1",
        "SWANLAB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }
