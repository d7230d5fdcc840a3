"""Checkpoints, model files and export: whole or absent, and never code in a file.

checkpoint.py writes a folder that is whole or absent, pieces.py one of all ranks, model_file.py
safetensors with checksums. export.py and foreign.py make plain files of any checkpoint.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
