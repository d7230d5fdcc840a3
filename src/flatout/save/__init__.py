"""Checkpoints, model files and export. Files are complete or absent, and code in them never runs.

checkpoint.py writes each checkpoint as a folder that is complete or absent. pieces.py lets all
ranks write one checkpoint together. model_file.py writes safetensors files with checksums.
export.py and foreign.py read weights from any checkpoint and write them as plain files.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
