"""What a model is to Flatout: facts about it, and changes that leave its result alone."""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
