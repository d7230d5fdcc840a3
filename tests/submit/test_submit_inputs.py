"""What a script reads: found in its arguments, and seen by nodes or not."""

import pytest
from jobs import job

from flatout.errors import SubmitError
from flatout.submit.code import collect
from flatout.submit.inputs import in_arguments, input_of, mount_of
from flatout.submit.shared import unseen

MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:5 / /home rw - nfs4 server:/home rw,vers=4.2
23 22 8:2 / /home/me/scratch rw - xfs /dev/sdb1 rw
24 21 0:6 / /lustre rw - lustre mds@tcp:/fs rw
25 21 0:7 / /mnt/with\\040space rw - fuse.sshfs host:/ rw
26 21 0:8 / /dev/shm rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "point", "is_network"),
    [
        ("/home/me/day.svm", "/home", True),
        ("/home/me/scratch/day.svm", "/home/me/scratch", False),
        ("/home2/x", "/", False),
        ("/lustre/a/b", "/lustre", True),
        ("/mnt/with space/x", "/mnt/with space", True),
        ("/dev/shm/x", "/dev/shm", False),
        ("/", "/", False),
    ],
)
def test_the_file_system_decides_who_sees_a_path(path, point, is_network):
    found = mount_of(path, MOUNTS)
    assert (found.point, found.is_network) == (point, is_network)


def test_arguments_that_name_something(tmp_path):
    for name in ("day.svm", "config.yaml", "days/1.svm"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    given = ["--data=day.svm", "day.svm", "--config", "config.yaml", "days/*.svm", "none.svm"]
    given += ["s3://bucket/day", "--out=gs://b/x", "-x", ".", "", "--lr=3", "x" * 5000, "a://b c"]
    assert in_arguments(given, tmp_path) == [
        *("day.svm", "config.yaml", "days/*.svm", "s3://bucket/day", "gs://b/x")
    ]


def test_what_no_node_sees_is_named_with_its_file_system(tmp_path):
    (tmp_path / ".gitignore").write_text("*.svm\n")
    (tmp_path / "day.svm").write_text("1 1:1\n")
    (tmp_path / "config.yaml").write_text("a: 1\n")
    code = collect(tmp_path)
    day = input_of("day.svm", tmp_path, code)
    assert day.is_missing
    assert f"lies on {mount_of(tmp_path)}, no node sees it" in day.words
    assert input_of("config.yaml", tmp_path, code).travels
    assert not input_of("config.yaml", tmp_path, code).is_missing
    assert input_of("day.svm", tmp_path, code, shared=[str(tmp_path)]).is_seen
    assert not input_of("s3://bucket/day.svm", tmp_path, code).is_missing
    # A folder travels only as a whole.
    (tmp_path / "days").mkdir()
    (tmp_path / "days/README").write_text("")
    (tmp_path / "days/1.svm").write_text("")
    assert not input_of("days", tmp_path, collect(tmp_path)).travels


def test_the_folder_of_the_job_and_its_checkpoints_must_be_seen(tmp_path):
    made = job(tmp_path, checkpoint="/nowhere/run")
    assert unseen(made) == []
    alone = type(made)(**{**vars(made), "shared": ()})
    assert [line.split(" lies on")[0] for line in unseen(alone)] == [
        f"the job's folder {made.folder}",
        "the run folder /nowhere/run",
    ]


def test_checkpoints_that_no_one_may_write_are_named(tmp_path, monkeypatch):
    made = job(tmp_path, checkpoint=f"{tmp_path}/runs/day")
    assert unseen(made) == []
    (tmp_path / "runs").mkdir()
    assert unseen(made) == []
    monkeypatch.setattr("os.access", lambda path, mode: path != f"{tmp_path}/runs")
    (line,) = unseen(made)
    assert line.endswith(f"/runs/day: you may not write into {tmp_path}/runs")
    (tmp_path / "runs/day").write_text("a file")
    (line,) = unseen(made)
    assert line.endswith(f"you may not write into {tmp_path}/runs/day")


def test_data_beside_the_code_are_linked_into_its_copy(tmp_path):
    (tmp_path / ".gitignore").write_text("*.svm\n")
    for name in ("a day.svm", "days/1.svm", "days/2.svm"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    made = job(tmp_path, "a day.svm", "days/*.svm", "/etc/hostname")
    found = [link for one in made.inputs for link in one.links(tmp_path)]
    assert found == [
        (f"{tmp_path}/{name}", name) for name in ("a day.svm", "days/1.svm", "days/2.svm")
    ]
    for number in range(300):
        (tmp_path / f"{number}.svm").write_text("")
    with pytest.raises(SubmitError, match="stands for 301 files"):
        input_of("*.svm", tmp_path, collect(tmp_path)).links(tmp_path)
