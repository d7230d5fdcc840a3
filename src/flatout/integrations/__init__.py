"""Callbacks for other trainers, which record the lanes of their steps by one line of code.

    lightning.Trainer(callbacks=[flatout.integrations.LightningTimeline()])
    transformers.Trainer(..., callbacks=[flatout.integrations.HFTimeline()])
    keras_model.fit(..., callbacks=[flatout.integrations.KerasTimeline()])

The first access to a name loads its framework, and no other.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
