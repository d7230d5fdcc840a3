"""Runs a script as a rank, or serves: `python -m flatout.strategies.start script.py args`.

`flatout run --servers` starts all processes of a job in this way. The last of them are parameter
servers, which never run the script.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from flatout.world import place, servers, start

# Maximum seconds that the store may take to answer at the end.
_STORE_S = 10.0


def main(arguments: list[str]) -> None:
    """Run a script, or after -m a module, as `python` would; or serve until the job ends."""
    here = place()
    number = servers.number_of(here)
    if number is not None:
        start.end_with_parent()  # before torch loads, which takes seconds
        from flatout.strategies.servers.process import serve

        servers.become_server(here, os.environ)
        sys.exit(serve(number))
    servers.become_rank(here, os.environ)
    try:
        start.main(arguments)
    finally:
        if here.rank == 0:
            with suppress(RuntimeError):
                servers.open_store(_STORE_S).set(servers.OVER, "")


if __name__ == "__main__":
    main(sys.argv[1:])
