"""Rooms import one another's public names from the room, not from files in it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flatout

ROOT = Path(flatout.__file__).parent
_IMPORT = re.compile(r"^ *from flatout\.(\w+)\.([\w.]+) import (\([^)]*\)|[^\n(]+)$", re.MULTILINE)


def test_names_of_other_rooms_come_from_the_room():
    around, looked_at = [], 0
    for file in ROOT.rglob("*.py"):
        own = file.relative_to(ROOT).parts[0]
        for room, module, given in _IMPORT.findall(file.read_text()):
            looked_at += 1
            names = re.findall(r"(\w+)(?: as \w+)?,?", given)
            *folders, file_name = module.split(".")
            # A function of its module's name is the module, once that is loaded.
            if room == own or file_name in names:
                continue
            folder = ROOT.joinpath(room, *folders, file_name)
            if not all((folder / f"{name}.py").is_file() for name in names):
                around.append(f"{file.relative_to(ROOT)}: {room}.{module}: {', '.join(names)}")
    assert looked_at > 1000  # or the pattern has missed them
    assert around == []


@pytest.mark.slow
def test_names_that_load_late_leave_the_random_numbers_of_a_script_alone():
    code = """
import random, flatout
random.seed(0)
wanted = random.getstate()
flatout.Trainer
assert random.getstate() == wanted
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
