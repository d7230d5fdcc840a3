"""torchrun's command line, changed so that each rank is observed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flatout.errors import FlatoutError


def under_torchrun(what: Sequence[str], observe: Sequence[str]) -> list[str] | None:
    """Return a command that starts the ranks as asked, each of them observed.

    Args:
        what: torchrun, its options, the script, the script's arguments.
        observe: arguments of Python that run a script under observation.

    Returns:
        The command; None if `what` does not run torchrun.

    Raises:
        FlatoutError: the command line names no script, or one that Python does not run.
    """
    if Path(what[0]).name != "torchrun":
        return None
    # torchrun's own parser knows which options take a value, and hence where the script begins.
    from torch.distributed.run import get_args_parser

    try:
        read = get_args_parser().parse_args(list(what[1:]))
    except SystemExit:
        raise FlatoutError(
            "torchrun does not take these options", do="see torchrun --help"
        ) from None
    if read.no_python:
        raise FlatoutError("only scripts of Python can be observed, not --no-python")
    script = [read.training_script, *read.training_script_args]
    options = list(what[1 : len(what) - len(script)])
    if read.module:
        options = [option for option in options if option not in ("-m", "--module")]
        script = ["-m", *script]
    return [sys.executable, "-m", "torch.distributed.run", *options, *observe, *script]
