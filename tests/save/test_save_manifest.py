import json

import pytest

from flatout.errors import CheckpointError
from flatout.save import manifest as manifests
from flatout.save.seal import BLANK, seal
from flatout.save.storage import Folder, Written


def made_up(folder, **changes):
    """A manifest with a good seal, as anyone can make one."""
    whole = manifests.Manifest(3, {"a.json": Written(2, "0" * 64)}, 0.5, {"x": 1})
    fields = json.loads(manifests.dump(whole))
    fields = {**fields, "manifest_sha256": BLANK, **changes}
    text = seal("manifest_sha256", json.dumps(fields).encode())
    (folder / manifests.MANIFEST).write_bytes(text)
    return Folder(str(folder))


def test_what_was_written_is_read(tmp_path):
    found = manifests.read(made_up(tmp_path))
    assert found == manifests.Manifest(3, {"a.json": Written(2, "0" * 64)}, 0.5, {"x": 1})


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "3"},
        {"step": -1},
        {"step": True},
        {"score": "best"},
        {"files": []},
        {"files": {"a": {"size": 1}}},
        {"files": {"a": {"size": "1", "sha256": "0"}}},
        {"files": {"a": {"size": -1, "sha256": "0"}}},
        {"files": {"a": {"size": 1, "sha256": 0}}},
        {"files": {"../a": {"size": 1, "sha256": "0"}}},
        {"files": {"/etc/passwd": {"size": 1, "sha256": "0"}}},
        {"files": {"a/../../b": {"size": 1, "sha256": "0"}}},
        {"files": {"a\0b": {"size": 1, "sha256": "0"}}},
        {"files": {"": {"size": 1, "sha256": "0"}}},
        {"meta": 7},
        {"format": None},
        {"format": 99},
    ],
)
def test_a_manifest_with_a_good_seal_may_still_be_made_up(tmp_path, changes):
    with pytest.raises(CheckpointError) as found:
        manifests.read(made_up(tmp_path, **changes))
    assert str(tmp_path / manifests.MANIFEST) in str(found.value)
