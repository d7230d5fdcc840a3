"""Parts that act around a step, each in a separate file; `order.py` has their order."""
