"""One rank of a notebook's fit: `python -m flatout.train.notebook.notebook_rank FOLDER`."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

from flatout.train.notebook.notebook_files import pack_error, pack_result, unpack
from flatout.train.signals import NOTEBOOK
from flatout.world import POLITE_S, LostRank, end_with_parent, place


def main(folder: Path) -> int:
    """Run the fit, write its result, and return the exit code."""
    end_with_parent()
    os.environ[NOTEBOOK] = "1"
    # A kernel asks for colors, but its terminal cannot redraw a bar.
    os.environ.pop("FORCE_COLOR", None)
    # torch marks the optimizer as wrapped; the mark is lost when the optimizer is pickled.
    warnings.filterwarnings("ignore", message=r".*`optimizer.step\(\)` has been overridden")
    rank = place().rank
    try:
        trainer, args, kwargs = unpack(folder)
        try:
            trainer.fit(*args, **kwargs)
        finally:
            if rank == 0:
                pack_result(folder, trainer, kwargs["callbacks"])
    except LostRank:
        time.sleep(POLITE_S)
        return LostRank.code
    except BaseException as error:
        pack_error(folder, rank, error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
