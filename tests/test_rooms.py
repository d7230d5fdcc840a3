"""What is public of a room is imported from the room, not from a file in it."""

import re
from pathlib import Path

import flatout

ROOT = Path(flatout.__file__).parent
_STUB = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)
_IMPORT = re.compile(r"^ *from flatout\.(\w+)\.([\w.]+) import (\([^)]*\)|[^\n(]+)$", re.MULTILINE)


def test_public_names_of_other_rooms_come_from_the_room():
    homes = {
        stub.parent.name: {name: module for module, name in _STUB.findall(stub.read_text())}
        for stub in ROOT.glob("*/__init__.pyi")
    }
    around = []
    for file in ROOT.rglob("*.py"):
        own = file.relative_to(ROOT).parts[0]
        for room, module, given in _IMPORT.findall(file.read_text()):
            for name in re.findall(r"(\w+)(?: as \w+)?,?", given):
                is_public = homes.get(room, {}).get(name) == f"flatout.{room}.{module}"
                # A function of its module's name is the module, once that is loaded.
                if room != own and is_public and name != module:
                    around.append(f"{file.relative_to(ROOT)}: {room}.{module}.{name}")
    assert len(homes) > 10
    assert around == []
