"""What more hosts, devices or money would give, with intervals, from what runs measured."""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
