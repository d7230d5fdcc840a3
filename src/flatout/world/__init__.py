"""The ranks of one job: where this one stands, and what they do together.

place.py reads the rank from torchrun's, Open MPI's or SLURM's variables. world.py has the
collectives. launch.py and start.py start ranks on torch.distributed's elastic agent;
rendezvous.py, tunnel.py and secret.py connect nodes. mailbox.py exchanges tensors in shared
memory, messages.py through sockets. servers.py says which processes are servers alone. watch.py
and hang.py name the rank that is missing in a collective; dropped.py has the ranks that a job
goes on without, agreement_points.py what ranks agree on, such as an end.
"""

from flatout.lazy import attach

# Not lazily, or the module would take the place of the function.
from flatout.world.place import place as place

__getattr__, __dir__, __all__ = attach(__name__, __file__)
