"""How parameters, gradients and samples are laid over the World: a file per strategy."""

from flatout.strategies.ddp import Ddp
from flatout.strategies.replicas import check_replicas

__all__ = ["Ddp", "check_replicas"]
