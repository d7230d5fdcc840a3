"""How parameters, gradients and samples are laid over the World: a file per strategy."""

from flatout.strategies.alone import Alone
from flatout.strategies.ddp import Ddp, Sums
from flatout.strategies.rank_rng import rank_rng
from flatout.strategies.replicas import check_replicas
from flatout.strategies.sparse import sparse_weights
from flatout.strategies.sync_batch_norm import SyncBatchNorm

__all__ = ["Alone", "Ddp", "Sums", "SyncBatchNorm", "check_replicas", "rank_rng", "sparse_weights"]
