"""Jobs sent to a server that answers as the API server of Kubernetes does, through its client."""

import shutil
import subprocess
from dataclasses import replace

import pytest
from api_server import add_pod, api_server, kubectl
from submit_schemas import a_job, has_crds

from flatout.errors import SubmitError
from flatout.submit.ledger import Ledger
from flatout.submit.send import runs_of, send_all, send_once, settle, write
from flatout.submit.target import NotSent, State, target_of

pytest.importorskip("kubernetes")

pytestmark = has_crds


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with api_server(tmp_path) as (server, config):
        monkeypatch.setenv("KUBECONFIG", config)
        yield server


def sent(job, tmp_path):
    write(job, to := target_of("kubernetes"))
    assert to.check(job) == []
    return send_once(job, to, Ledger(tmp_path / "ledger"), wait_s=1.0)


def read(server, job):
    return server.objects["team", "trainjobs", job.name]


def test_a_job_is_created_with_what_its_pods_wait_for(cluster, tmp_path):
    job = a_job(tmp_path, nodes=2)
    found = sent(job, tmp_path)
    assert found.id == f"team/{job.name}"
    assert [one for one, _ in cluster.posts] == ["trainjobs", "configmaps", "secrets"]
    made = read(cluster, job)
    for _, one in cluster.posts[1:]:
        (owner,) = one["metadata"]["ownerReferences"]
        assert owner["uid"] == made["metadata"]["uid"]
    secret = cluster.posts[2][1]["stringData"]["FLATOUT_SECRET"]
    assert len(secret) == 64
    assert secret not in (job.folder / "job.yaml").read_text()
    with pytest.raises(NotSent, match="already"):
        target_of("kubernetes").send(job, "another")
    assert len(cluster.posts) == 3


def test_what_the_user_has_changed_is_sent(cluster, tmp_path):
    job = a_job(tmp_path)
    write(job, to := target_of("kubernetes"))
    path = job.folder / "job.yaml"
    path.write_text(path.read_text().replace("numNodes: 1", "numNodes: 3"))
    to.send(job, "key")
    assert read(cluster, job)["spec"]["trainer"]["numNodes"] == 3
    path.write_text(path.read_text().replace("numNodes: 3", "numNodes: three"))
    (refused,) = to.check(job)
    assert "is not of type 'integer'" in refused


def test_what_is_not_there_is_said_before_sending(cluster, tmp_path):
    elsewhere = a_job(tmp_path / "elsewhere", options={"namespace": "nowhere"})
    write(elsewhere, target_of("kubernetes"))
    assert target_of("kubernetes").check(elsewhere) == ['namespaces "nowhere" not found']
    job = a_job(tmp_path, options={"volumes": "runs:/runs"})
    write(job, to := target_of("kubernetes"))
    missing = ["there is no PersistentVolumeClaim runs in team"]
    assert to.check(job) == missing
    cluster.fail["trainjobs"] = 403
    assert to.check(job) == ["no one may create these here", *missing]
    assert cluster.posts == []
    cluster.forbidden = {"persistentvolumeclaims"}
    del cluster.fail["trainjobs"]
    assert to.check(job) == []


def test_one_yes_for_all_seeds(cluster, tmp_path):
    job = a_job(tmp_path, arguments=("--seed", "{seed}"), seeds=(1, 2, 3), name="train")
    to, ledger = target_of("kubernetes"), Ledger(tmp_path / "ledger")
    jobs = runs_of(job, to)
    for one in jobs:
        write(one, to)
    assert [one.id for one in send_all(jobs[:2], to, ledger)] == ["team/train-1", "team/train-2"]
    args = read(cluster, jobs[1])["spec"]["trainer"]["args"]
    assert args[-2:] == ["--seed", "2"]
    # The third is sent once more with another that is there already, and both are told.
    with pytest.raises(NotSent, match=r"train-2: there is a job .*; sent were team/train-3, and"):
        send_all([jobs[2], jobs[1]], to, ledger)
    assert [one.id for one in ledger.entries() if one.status == "sent"] == [
        f"team/train-{seed}" for seed in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("plural", "how"), [("trainjobs", "dropped"), ("configmaps", "broken"), ("secrets", "dropped")]
)
def test_a_lost_answer_makes_no_second_job_and_leaves_nothing_out(plural, how, cluster, tmp_path):
    cluster.fail[plural] = how
    job = a_job(tmp_path, nodes=2)
    write(job, to := target_of("kubernetes"))
    ledger = Ledger(tmp_path / "ledger")
    found = send_once(job, to, ledger, wait_s=5.0)
    assert found.id == f"team/{job.name}"
    assert [one for one, _ in cluster.posts] == ["trainjobs", "configmaps", "secrets"]
    uid = read(cluster, job)["metadata"]["uid"]
    owners = [one["metadata"]["ownerReferences"] for _, one in cluster.posts[1:]]
    assert [one["uid"] for (one,) in owners] == [uid, uid]
    assert to.find("another", job.folder) is None
    (entry,) = ledger.entries()
    assert (entry.status, entry.id) == ("sent", found.id)
    assert settle(replace(entry, status="sending", id=""), to, ledger).id == found.id


def test_a_job_whose_code_is_refused_is_taken_back(cluster, tmp_path):
    cluster.fail["configmaps"] = 403
    job = a_job(tmp_path)
    write(job, to := target_of("kubernetes"))
    with pytest.raises(NotSent, match="the job's code was not taken"):
        send_once(job, to, Ledger(tmp_path / "ledger"))
    assert cluster.objects == {}


@pytest.mark.parametrize(
    ("status", "state", "words"),
    [
        ({}, State.queued, "no pods yet"),
        ({"jobsStatus": [{"name": "node", "active": 1}]}, State.starting, "pods are created"),
        ({"jobsStatus": [{"name": "node", "ready": 1}]}, State.running, "pods are ready"),
        ({"conditions": [("Suspended", "kueue holds it")]}, State.queued, "kueue holds it"),
        ({"conditions": [("Complete", "all done")]}, State.succeeded, "all done"),
        ({"conditions": [("Failed", "DeadlineExceeded")]}, State.failed, "DeadlineExceeded"),
    ],
)
def test_states_of_a_train_job(status, state, words, cluster, tmp_path):
    job = a_job(tmp_path)
    id = sent(job, tmp_path).id
    made = read(cluster, job)
    made["status"] = {**status, "trainerStatus": {"progressPercentage": 40,
                      "estimatedRemainingSeconds": 90}}  # fmt: skip
    if "conditions" in status:
        made["status"]["conditions"] = [
            {"type": kind, "status": "True", "message": said, "lastTransitionTime": "2026-11-26"}
            for kind, said in status["conditions"]
        ]
    found = target_of("kubernetes").state(id, job.folder)
    assert (found.state, words in found.words) == (state, True)
    if state == State.running:
        assert found.eta == "1:30, 40% done"


def test_the_exit_code_of_the_pod_that_failed_first(cluster, tmp_path):
    job = a_job(tmp_path, nodes=2)
    id = sent(job, tmp_path).id
    read(cluster, job)["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    assert target_of("kubernetes").state(id, job.folder).exit_code is None
    for number, (code, at) in enumerate([(75, "10:05"), (7, "10:04"), (0, "10:03")]):
        ended = {"exitCode": code, "finishedAt": f"2026-11-26T{at}:00Z"}
        status = {"name": "node", "ready": False, "restartCount": 0, "image": "a", "imageID": "b",
                  "state": {"terminated": ended}}  # fmt: skip
        began = f"2026-11-26T09:0{number}:00Z"
        add_pod(cluster, job, number, containerStatuses=[status], startTime=began)
    found = target_of("kubernetes").state(id, job.folder)
    assert (found.exit_code, found.since_s) == (7, 3900.0)


@pytest.mark.parametrize("follow", [False, True])
def test_logs_of_all_pods(follow, cluster, tmp_path):
    job = a_job(tmp_path, nodes=2)
    id = sent(job, tmp_path).id
    to = target_of("kubernetes")
    with pytest.raises(SubmitError, match="has no pods"):
        list(to.logs(id, job.folder, follow=follow))
    first = add_pod(cluster, job, 0, "epoch 1\nü\nlast")
    assert "".join(to.logs(id, job.folder, follow=follow)) == "epoch 1\nü\nlast"
    second = add_pod(cluster, job, 1, "Traceback\n")
    found = set(to.logs(id, job.folder, follow=follow))
    assert found == {
        *(f"{first}: epoch 1\n", f"{first}: ü\n", f"{first}: last", f"{second}: Traceback\n")
    }


def test_cancel(cluster, tmp_path):
    job = a_job(tmp_path)
    id = sent(job, tmp_path).id
    to = target_of("kubernetes")
    to.cancel(id, job.folder)
    assert ("team", "trainjobs", job.name) not in cluster.objects
    assert to.state(id, job.folder).state == State.canceled
    to.cancel(id, job.folder)  # once more is no error


def with_flatout(folder, text):
    """Variables of a pod whose `flatout` is a shell script."""
    folder.mkdir()
    (folder / "flatout").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "flatout").chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_top_looks_into_each_pod_that_runs(cluster, tmp_path, monkeypatch):
    job = a_job(tmp_path, nodes=2)
    id, to = sent(job, tmp_path).id, target_of("kubernetes")
    (entry,) = Ledger(tmp_path / "ledger").entries()
    first = add_pod(cluster, job, 0, phase="Pending")
    with pytest.raises(SubmitError, match="none of its pods runs"):
        to.top(id, job.folder, entry.key)
    env = read(cluster, job)["spec"]["trainer"]["env"]
    own = {item["name"]: item.get("value", "") for item in env}
    text = 'printf "%s " "$FLATOUT_SUBMITTED" "$@"'
    variables = own | with_flatout(tmp_path / "pod", text)
    cluster.objects["team", "pods", first]["status"] = {"phase": "Running"}
    pods = dict.fromkeys([first, add_pod(cluster, job, 1, phase="Running")], variables)
    monkeypatch.setenv("PATH", kubectl(tmp_path / "bin", pods), prepend=":")
    found = to.top(id, job.folder, entry.key)
    assert [one.split() for one in found] == [[entry.key, "top", "--json", entry.key]] * 2


def test_a_pod_that_cannot_be_looked_into(cluster, tmp_path, monkeypatch):
    job = a_job(tmp_path)
    id, to = sent(job, tmp_path).id, target_of("kubernetes")
    name = add_pod(cluster, job, 0, phase="Running")
    variables = with_flatout(tmp_path / "pod", "echo 'no such command: top' >&2; exit 2")
    monkeypatch.setenv("PATH", kubectl(tmp_path / "bin", {name: variables}), prepend=":")
    with pytest.raises(SubmitError, match="kubectl exec: no such command: top"):
        to.top(id, job.folder, "key")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(SubmitError, match="kubectl: No such file"):
        to.top(id, job.folder, "key")


def test_no_cluster(tmp_path, monkeypatch):
    job = a_job(tmp_path)
    write(job, to := target_of("kubernetes"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(SubmitError, match="knows no cluster"):
        to.check(job)


def test_a_server_that_does_not_answer(cluster, tmp_path):
    job = a_job(tmp_path)
    write(job, to := target_of("kubernetes"))
    cluster.shutdown()
    cluster.server_close()
    with pytest.raises(SubmitError, match="does not answer"):
        to.check(job)
    with pytest.raises(NotSent, match="not reached"):
        to.send(job, "key")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
def test_kubectl_applies_what_was_written(cluster, tmp_path):
    """By hand, as the page says, with every field checked by the server."""
    job = a_job(tmp_path, nodes=2)
    write(job, target_of("kubernetes"))
    applied = ["kubectl", "apply", "--validate=strict", "-f", str(job.folder / "job.yaml")]
    for more in (["--dry-run=server"], []):
        done = subprocess.run([*applied, *more], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert job.name in done.stdout
    assert ("team", "trainjobs", job.name) in cluster.objects
    sent = [query for plural, query in cluster.asked if plural == "trainjobs"]
    assert all(query["fieldValidation"] == ["Strict"] for query in sent)
    path = job.folder / "job.yaml"
    path.write_text(path.read_text().replace("\nspec:", "\nspec:\n  typo: 3", 1))
    cluster.objects.clear()
    done = subprocess.run(applied, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "is invalid" in done.stderr
    assert ("team", "trainjobs", job.name) not in cluster.objects
