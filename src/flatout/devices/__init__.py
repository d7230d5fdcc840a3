"""What this machine has, and where and how a job runs on it.

Importing this room loads neither torch nor a device driver: threads, the allocator and device
settings must land before torch does.
"""

from flatout.devices.inventory import Inventory, inventory
from flatout.devices.ping_pong import PingPong, find_ping_pong
from flatout.devices.placement import Placed, Placement, pin, place, resolve_device
from flatout.devices.threads import usable_cpus

__all__ = [
    "Inventory",
    "PingPong",
    "Placed",
    "Placement",
    "find_ping_pong",
    "inventory",
    "pin",
    "place",
    "resolve_device",
    "usable_cpus",
]
