"""What a script reads, as it is seen while it runs for some seconds."""

import textwrap

import pytest

from flatout.errors import SubmitError
from flatout.submit import JobOptions, inputs_seen
from flatout.submit.observed_inputs import data_of

SCRIPT = """
    import mmap, os, sys
    import torch

    x = [float(word) for line in open("day.svm") for word in line.split()]
    names = sorted(os.listdir("images"))
    first = open(f"images/{names[0]}", "rb").read()
    kept = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ)
    open("out.txt", "w").write("written")
    open("out.txt").read()
    model = torch.nn.Linear(1, 1)
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(200):
        model(torch.ones(1, 1)).sum().backward()
        rule.step()
"""


def test_what_of_opened_paths_is_data(tmp_path):
    root = tmp_path / "root"
    for name in ("train.py", "day.svm", "config.yaml", "images/a/1.jpg", "images/a/2.jpg",
                 "lib/__init__.py", "lib/table.bin", "out.txt"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    other = tmp_path / "elsewhere.bin"
    other.write_text("")
    opened = [
        *(("listed", root), ("read", root / "train.py"), ("read", root / "day.svm")),
        *(("listed", root / "images"), ("listed", root / "images/a")),
        *(("read", root / "images/a/1.jpg"), ("read", root / "config.yaml")),
        *(("listed", root / "lib"), ("read", root / "lib/table.bin"), ("read", other)),
        *(("written", root / "out.txt"), ("read", root / "out.txt")),
        *(("read", root / "gone.svm"), ("read", "/etc/hosts"), ("read", torch_file())),
    ]
    found = data_of([(how, str(path)) for how, path in opened], root)
    assert sorted(found) == sorted(
        ["config.yaml", "day.svm", "images", "lib/table.bin", str(other)]
    )
    # Many of one folder are named by it.
    many = [root / f"shards/{n}.bin" for n in range(30)]
    many[0].parent.mkdir()
    for one in many:
        one.write_text("")
    assert data_of([("read", str(one)) for one in many], root) == ["shards"]


def torch_file():
    import torch

    return torch.__file__


@pytest.mark.slow
def test_a_script_is_seen_to_read_its_data(tmp_path, monkeypatch):
    root, held = tmp_path / "root", tmp_path / "held.bin"
    (root / "images").mkdir(parents=True)
    (root / "images/1.jpg").write_text("x")
    (root / "day.svm").write_text("1 2\n")
    held.write_bytes(b"0" * 5000)
    (root / "train.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(root)
    asked = JobOptions("train.py", arguments=(str(held),))
    found = inputs_seen(asked, root)
    assert sorted(found) == sorted(["day.svm", "images", str(held)])
    assert not (root / "out.txt").exists()
    (root / "train.py").write_text("raise SystemExit('no such table')")
    with pytest.raises(SubmitError, match="failed when it was looked at") as no:
        inputs_seen(asked, root)
    assert "no such table" in no.value.where
    with pytest.raises(SubmitError, match="names what it reads"):
        inputs_seen(JobOptions("flatout", arguments=("data", "convert")), root)
