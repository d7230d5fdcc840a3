"""Reference by `keras.Model.fit`, for the jobs of compiled Keras models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from combinations import keras_models, plain
from combinations.calls import counted
from combinations.inputs import batch_size, held_out


def train(case: Any) -> dict[str, Any]:
    model = keras_models.compiled(case)
    watch = keras_models.watch(case)
    callbacks = keras_models.callbacks(case, Path(os.environ["CALLS"]).parent, -1)
    data = keras_models.reference_data(case, {})
    history = model.fit(**data, verbose=0, callbacks=[*callbacks, watch])
    calls = counted()
    x, y, w = held_out()
    events = list(watch.events)
    weighted = {"sample_weight": w} if case.weights == "sample" else {}
    figures = model.evaluate(
        x, y, batch_size=batch_size(case), verbose=0, return_dict=True, **weighted
    )
    return {
        "loss": history.history["loss"],
        "val_loss": history.history.get("val_loss", []),
        "names": sorted(history.history),
        "rates": watch.rates,
        "events": events,
        "calls": calls,
        "weights": plain.weights_of(model),
        "evaluate": figures["loss"],
        "predict": torch.as_tensor(model.predict(x, verbose=0)),
    }
