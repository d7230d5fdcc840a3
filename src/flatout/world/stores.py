"""The store of keys and bytes in which ranks meet, and connections to it.

Ranks that one agent has started on one node meet in a file in memory that the agent holds. The
kernel lets no other user open it, whereas torch's TCPStore answers any process that connects. Other
launchers provide only an address.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from flatout.errors import WorldError
from flatout.world.network import LOOPBACK, is_here, listen, listening_address, reached_at

if TYPE_CHECKING:
    from flatout.world.place import Place

VARIABLE = "FLATOUT_STORE"

# Bytes of each rank on a board. The file's pages exist only once they are written.
_ROOM = 1 << 20
_HEAD = 8
_READS = 5


class OwnFiles(NamedTuple):
    """Files in memory that the ranks of one node share."""

    port: int
    store: str
    board: str


@contextmanager
def own_files(port: int) -> Iterator[dict[str, str]]:
    """Hold such files in an agent, and yield the variable by which its ranks find them."""
    if not hasattr(os, "memfd_create"):
        yield {}
        return
    names = ("flatout-store", "flatout-board")
    files = [os.memfd_create(name, os.MFD_CLOEXEC) for name in names]
    try:
        paths = [f"/proc/{os.getpid()}/fd/{file}" for file in files]
        yield {VARIABLE: " ".join((str(port), *paths))}
    finally:
        for file in files:
            os.close(file)


def files_of(here: Place) -> OwnFiles | None:
    """Return the files that the agent of this rank holds, or None."""
    words = os.environ.get(VARIABLE, "").split()
    if len(words) != 3 or words[0] != str(here.port) or here.nodes > 1:
        return None
    return OwnFiles(int(words[0]), *words[1:])


def open_store(here: Place, timeout: timedelta) -> Any:
    """Open the store where the ranks meet. The first rank creates it if no agent keeps it."""
    if files_of(here) is not None or here.rank > 0 or agent_keeps_it():
        return connect(here, timeout)
    return served(_address(here), here.port, timeout)


def served(address: str, port: int, timeout: timedelta) -> Any:
    """Return a torch store that listens on only one address. By default it would listen on all."""
    import torch.distributed as dist

    listening = listen(address, port)
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )


def connect(here: Place, timeout: timedelta) -> Any:
    import torch.distributed as dist

    files = files_of(here)
    if files is not None:
        store = dist.FileStore(files.store, -1)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return store
    return connect_to(_address(here), here.port, timeout)


def connect_to(address: str, port: int, timeout: timedelta) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=False, wait_for_workers=False, timeout=timeout
    )


def part_of(store: Any, name: str) -> Any:
    """Return a store for the keys that begin with a name."""
    import torch.distributed as dist

    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _address(here: Place) -> str:
    if agent_keeps_it():
        return here.address
    if here.nodes == 1:
        _check_one_node(here)
        return LOOPBACK
    return listening_address(here.address) if here.rank == 0 else reached_at(here.address)


def _check_one_node(here: Place) -> None:
    names_ranks = here.launcher != "torchrun" or "LOCAL_WORLD_SIZE" in os.environ
    if not names_ranks and not is_here(here.address):
        raise WorldError(
            f"MASTER_ADDR is {here.address}, which is no address of this node, and nothing tells "
            "how many ranks each node has",
            where=str(here),
            do="set LOCAL_RANK and LOCAL_WORLD_SIZE, which are 0 and 1 where each node has one "
            "rank; or start with flatout run or torchrun, which set them",
        )


def agent_keeps_it() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Board:
    """The latest text of each rank. A FileStore would keep all texts."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, rank: int, text: str) -> None:
        content = text.encode()
        if len(content) <= _ROOM - _HEAD:
            head = len(content).to_bytes(4, "little") + zlib.crc32(content).to_bytes(4, "little")
            os.pwrite(self._file, head + content, rank * _ROOM)

    def read(self, rank: int) -> str | None:
        """Return the text of a rank, or None if it has written none."""
        for _ in range(_READS):
            head = os.pread(self._file, _HEAD, rank * _ROOM)
            length = int.from_bytes(head[:4], "little")
            content = os.pread(self._file, length, rank * _ROOM + _HEAD)
            # The text may be incomplete while it is written.
            if length and zlib.crc32(content) == int.from_bytes(head[4:], "little"):
                return content.decode()
        return None
