"""Callbacks for other trainers: a line of code, and their steps are seen as lanes too.

    lightning.Trainer(callbacks=[flatout.integrations.LightningTimeline()])
    transformers.Trainer(..., callbacks=[flatout.integrations.HFTimeline()])
    keras_model.fit(..., callbacks=[flatout.integrations.KerasTimeline()])

A name loads its framework when it is asked for, and no other.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
