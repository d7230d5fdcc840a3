"""Training: one step, Loop, Trainer and its verbs, and what `auto` decides."""
