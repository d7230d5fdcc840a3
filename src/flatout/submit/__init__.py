"""Jobs on clusters: what `flatout run` starts here, written down for a cluster and sent there."""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
