"""The benches are scripts beside the package; their folders come last in the search path."""

import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
sys.path += [str(BENCH), str(BENCH / "peers")]
