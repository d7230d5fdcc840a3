"""Input: whatever a user hands over becomes batches in an order that is a function.

Names load lazily, because torch is not needed before the first of them is.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
