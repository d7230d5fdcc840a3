"""Marks the ends of epochs of a Trainer."""

from __future__ import annotations

from stamps import Stamps

import flatout


class Clock(flatout.Callback):
    def __init__(self, stamps: Stamps) -> None:
        self.stamps = stamps

    def on_epoch_end(self, state: object) -> None:
        self.stamps.mark()
