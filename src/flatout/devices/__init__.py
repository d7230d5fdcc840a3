"""What this machine has, and where and how a job runs on it.

Importing this room loads neither torch nor a device driver: threads, the allocator and device
settings must land before torch does.
"""

# Not lazily, or the module would take the place of the function.
from flatout.devices.inventory import inventory as inventory
from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
