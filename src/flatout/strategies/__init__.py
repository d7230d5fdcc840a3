"""Layouts of parameters, gradients and samples over the World: a file or folder per strategy.

strategy.py has the interface of a strategy around a step. ddp.py sums gradients in buckets
(buckets.py). fsdp/ shards model and states (blocks.py selects the modules, fully_shard.py sends).
staged/ is a pipeline of layers. local_sgd.py averages weights every few steps. servers/ steps
weights on parameter servers, which are threads of ranks or processes. reductions/ has the ways to
sum a bucket: gloo or NCCL, shared memory, a ring, PowerSGD.
"""

from flatout.lazy import attach

# Not lazily, because the submodule would replace the function of the same name.
from flatout.strategies.rank_rng import rank_rng as rank_rng

__getattr__, __dir__, __all__ = attach(__name__, __file__)
