"""The Recipe: every setting that decides how fast a job runs, asked for and resolved."""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
