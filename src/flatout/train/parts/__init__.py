"""Parts that act around a step, each in a file of its own; `order.py` has their order."""
