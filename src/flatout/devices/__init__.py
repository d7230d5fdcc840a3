"""The devices of this machine, and their selection and settings for a job.

Importing this room loads neither torch nor a device driver: threads, the allocator and device
settings must be set before torch loads.
"""

# Not lazily, because the submodule would replace the function of the same name.
from flatout.devices.inventory import inventory as inventory
from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
