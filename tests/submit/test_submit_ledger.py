"""A yes makes one job, whatever the cluster answers."""

import subprocess
import sys

import jobs
import pytest

from flatout.errors import SubmitError
from flatout.submit import NotSent, SentJob, UnknownOutcome, send_once, settle
from flatout.submit.ledger import REFUSED, SENDING, SENT, Entry, Ledger


def job(root):
    made = jobs.job(root)
    made.folder.mkdir(parents=True)
    return made


class Cluster:
    """Counts what comes, and answers as it is told."""

    name = "slurm"

    def __init__(self, answer, knows=True):
        self.answer, self.knows, self.came, self.ledger = answer, knows, [], Ledger()

    def send(self, job, key):
        # The key must be written down before anything is sent.
        assert [one.key for one in self.ledger.entries() if one.status == SENDING] == [key]
        self.came.append(key)
        if self.answer is not None:
            raise self.answer
        return SentJob("4711")

    def find(self, key, folder):
        return SentJob("4711") if self.knows and key in self.came else None


def test_a_sent_job_is_found_by_its_id_and_its_name(tmp_path):
    cluster, made = Cluster(None), job(tmp_path)
    assert send_once(made, cluster, Ledger()) == SentJob("4711")
    (entry,) = Ledger().entries()
    assert (entry.status, entry.id, entry.name) == (SENT, "4711", made.name)
    assert Ledger().find("4711") == Ledger().find(made.name) == entry
    assert Ledger().find("4711_2").id == "4711_2"
    with pytest.raises(SubmitError, match="no job '9'"):
        Ledger().find("9")


def test_without_an_answer_the_job_is_looked_for_and_never_sent_again(tmp_path):
    cluster = Cluster(UnknownOutcome("no answer of sbatch: timed out"))
    assert send_once(job(tmp_path), cluster, Ledger(), wait_s=0.1) == SentJob("4711")
    assert len(cluster.came) == 1
    assert Ledger().entries()[0].status == SENT


def test_a_job_that_no_one_knows_of_stays_open_until_it_is_found(tmp_path):
    cluster = Cluster(UnknownOutcome("no answer of sbatch: timed out"), knows=False)
    with pytest.raises(UnknownOutcome, match="does not know it by now"):
        send_once(job(tmp_path), cluster, Ledger(), wait_s=0.1)
    (entry,) = Ledger().entries()
    assert entry.status == SENDING
    assert settle(entry, cluster, Ledger()) == entry
    cluster.knows = True
    assert settle(entry, cluster, Ledger()).id == "4711"
    assert Ledger().entries()[0].status == SENT
    assert len(cluster.came) == 1


def test_a_refused_job_was_not_sent(tmp_path):
    with pytest.raises(NotSent):
        send_once(job(tmp_path), Cluster(NotSent("invalid partition")), Ledger())
    assert Ledger().entries()[0].status == REFUSED


def test_nothing_is_sent_where_the_key_cannot_be_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    cluster = Cluster(None)
    with pytest.raises(SubmitError, match="nothing was sent"):
        send_once(job(tmp_path), cluster, Ledger(tmp_path / "file/jobs.jsonl"))
    assert cluster.came == []


def test_many_write_at_once_and_a_torn_line_costs_only_itself(tmp_path):
    ledger = Ledger(tmp_path / "jobs.jsonl")
    write = (
        "import sys; from pathlib import Path; from flatout.submit import Entry, Ledger\n"
        "for n in range(50):\n"
        "    Ledger(Path(sys.argv[1])).write(Entry(f'{sys.argv[2]}-{n}', 'ssh', 'a', '/', ''))\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", write, str(ledger.path), str(n)]) for n in range(3)
    ]
    assert [one.wait(60) for one in writers] == [0, 0, 0]
    with ledger.path.open("a") as file:
        file.write('{"key": "torn\n[1]\n')
    ledger.write(Entry("last", "ssh", "a", "/", ""))
    keys = [one.key for one in ledger.entries()]
    assert len(keys) == len(set(keys)) == 151
    assert ledger.path.stat().st_mode & 0o077 == 0


def test_a_torn_line_and_invalid_bytes_hide_no_other_job(tmp_path):
    ledger = Ledger(tmp_path / "jobs.jsonl")

    def add(key):
        ledger.write(Entry(key=key, target="slurm", name=f"job-{key}", folder="/x", when="2026"))

    add("a")
    add("b")
    data = ledger.path.read_bytes()
    ledger.path.write_bytes(data[:-40])
    add("c")
    assert [entry.key for entry in ledger.entries()] == ["a", "c"]
    with open(ledger.path, "ab") as file:
        file.write(b"\xff\xfe{odd\n")
    add("d")
    assert [entry.key for entry in ledger.entries()] == ["a", "c", "d"]
