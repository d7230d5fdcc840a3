"""Instrumenting any script: where its time goes, and what it does that costs or endangers."""

from flatout.observe.observation import (
    Call,
    Loader,
    Model,
    Observation,
    Optimizer,
    Site,
)

__all__ = ["Call", "Loader", "Model", "Observation", "Optimizer", "Site"]
