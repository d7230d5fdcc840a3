"""The ranks of one job: the place of this rank, and the collectives of all ranks.

place.py reads the rank from torchrun's, Open MPI's or SLURM's variables. world.py has the
collectives. launch.py and start.py start ranks on torch.distributed's elastic agent. meeting/ and
secret.py connect nodes. mailbox.py exchanges tensors in shared memory, messages.py through sockets.
servers.py knows the processes that are only servers. hangs/ names the rank that is missing in a
collective. dropped.py has the ranks that a job continues without, agreement_points.py the
agreements of ranks, such as on an end.
"""

from flatout.lazy import attach

# Not lazily, because the submodule would replace the function of the same name.
from flatout.world.place import place as place

__getattr__, __dir__, __all__ = attach(__name__, __file__)
