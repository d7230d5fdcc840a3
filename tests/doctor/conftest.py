"""The scripts of the bench's corpus are read by its own reader, which comes last in the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
