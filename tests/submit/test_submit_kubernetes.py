"""Jobs sent to a server that answers as the API server of Kubernetes does, through its client."""

import http.server
import json
import re
import shutil
import subprocess
import threading
import urllib.parse
from dataclasses import replace

import pytest
import yaml
from submit_schemas import a_job, has_crds, validator

from flatout.errors import SubmitError
from flatout.submit.ledger import Ledger
from flatout.submit.sending import runs_of, send, send_all, settle, write
from flatout.submit.states import State
from flatout.submit.target import NotSent, target_of

pytest.importorskip("kubernetes")
pytest.importorskip("kubeflow_trainer_api")
pytestmark = has_crds

OBJECT = re.compile(
    r"/(?:api/v1|apis/(?:trainer\.kubeflow\.org/v1alpha1|kubeflow\.org/v1|kueue\.x-k8s\.io/v1beta1))"
    r"/namespaces/(?P<space>[^/]+)"
    r"/(?P<plural>\w+)(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)
KINDS = {
    "trainjobs": "TrainJob",
    "pytorchjobs": "PyTorchJob",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
}
# What the server has, by where: plural, kind.
RESOURCES = {
    "api/v1": [("configmaps", "ConfigMap"), ("secrets", "Secret")],
    "apis/trainer.kubeflow.org/v1alpha1": [("trainjobs", "TrainJob")],
    "apis/kubeflow.org/v1": [("pytorchjobs", "PyTorchJob")],
}


def discovered(path):
    """What the server tells of itself, as clients ask before they send; None for another path."""
    at = path.strip("/")
    groups = [one.removeprefix("apis/") for one in RESOURCES if one.startswith("apis/")]
    match at.split("/"):
        case ["version"]:
            return {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            named = [
                {"name": one.split("/")[0], "versions": [version_of(one)],
                 "preferredVersion": version_of(one)}
                for one in groups
            ]  # fmt: skip
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}
        case ["openapi", "v3"]:
            return {
                "paths": {one: {"serverRelativeURL": f"/openapi/v3/{one}"} for one in RESOURCES}
            }
        case ["openapi", "v3", *rest] if "/".join(rest) in RESOURCES:
            return openapi("/".join(rest))
    if at not in RESOURCES:
        return None
    listed = [
        {"name": plural, "kind": kind, "namespaced": True, "singularName": kind.lower(),
         "verbs": ["get", "list", "create", "patch", "delete"]}
        for plural, kind in RESOURCES[at]
    ]  # fmt: skip
    group = at.removeprefix("apis/").removeprefix("api/")
    return {"kind": "APIResourceList", "groupVersion": group, "resources": listed}


def version_of(group_version):
    return {"groupVersion": group_version, "version": group_version.split("/")[1]}


def openapi(at):
    """That fields are validated by the server, where a client asks for it."""
    group, version = at.split("/")[1:] if at.startswith("apis/") else ("", "v1")
    paths = {}
    for plural, kind in RESOURCES[at]:
        whose = {"group": group, "version": version, "kind": kind}
        asked = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
        paths[f"/{at}/namespaces/{{namespace}}/{plural}/{{name}}"] = {
            "patch": {
                "x-kubernetes-group-version-kind": whose,
                "parameters": asked,
                "responses": {},
            }
        }
    return {"openapi": "3.0.0", "info": {"title": "here", "version": "1"}, "paths": paths}


class ApiServer(http.server.ThreadingHTTPServer):
    """Keeps objects by (namespace, plural, name), checked by the schemas of their CRDs."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects, self.posts, self.logs = {}, [], {}
        self.asked = []  # of each object that was sent, what the client asked for
        # By plural: an HTTP status in its place, "dropped" or "broken" after it was kept, once.
        self.fail = {}
        self.forbidden = set()  # plurals that no one may read

    def refusal(self, kind, body):
        if kind in ("TrainJob", "PyTorchJob"):
            return next((one.message for one in validator(kind).iter_errors(body)), None)
        return None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        at, query = self.where()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((at["plural"], query))
        space, plural = at["space"], at["plural"]
        key = (space, plural, body["metadata"]["name"])
        refused = self.server.refusal(KINDS[plural], body)
        if isinstance(self.server.fail.get(plural), int):
            return self.status(self.server.fail[plural], "no one may create these here")
        if refused:
            return self.status(422, f"{KINDS[plural]} is invalid: {refused}")
        if key in self.server.objects:
            return self.status(409, "already exists")
        body["metadata"] |= {"uid": f"uid-{len(self.server.objects)}", "namespace": space}
        if "dryRun" not in query:
            self.server.objects[key] = body
            self.server.posts.append((plural, body))
        how = "" if "dryRun" in query else self.server.fail.pop(plural, "")
        if how == "broken":
            return self.status(500, "etcdserver: request timed out")
        if how == "dropped":
            self.close_connection = True
            return self.connection.close()
        return self.answer(201, body)

    def do_GET(self):
        at, query = self.where()
        if (told := discovered(urllib.parse.urlsplit(self.path).path)) is not None:
            return self.answer(200, told)
        if at is None:
            return self.status(404, "404 page not found")
        if at["log"]:
            data = self.server.logs[at["name"]].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            return self.wfile.write(data)
        if at["plural"] in self.server.forbidden:
            return self.status(403, "you may not ask for these")
        if at["name"]:
            found = self.server.objects.get((at["space"], at["plural"], at["name"]))
            return self.status(404, "not found") if found is None else self.answer(200, found)
        wanted = query.get("labelSelector", [""])[0]
        items = [
            one for (space, plural, _), one in self.server.objects.items()
            if (space, plural) == (at["space"], at["plural"])
            and (not wanted or wanted in labels(one))
        ]  # fmt: skip
        return self.answer(
            200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}
        )

    def do_DELETE(self):
        at, _ = self.where()
        key = (at["space"], at["plural"], at["name"])
        if self.server.objects.pop(key, None) is None:
            return self.status(404, "not found")
        return self.status(200, "deleted")

    def where(self):
        url = urllib.parse.urlsplit(self.path)
        return OBJECT.fullmatch(url.path), urllib.parse.parse_qs(url.query)

    def status(self, code, message):
        self.answer(code, {"kind": "Status", "message": message, "code": code})

    def answer(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


def labels(made):
    return {f"{name}={value}" for name, value in made["metadata"].get("labels", {}).items()}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    server = ApiServer()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}
        ],
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "u", "user": {"token": "not-a-secret"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    yield server
    server.shutdown()
    server.server_close()


def sent(job, tmp_path):
    write(job, to := target_of("kubernetes"))
    assert to.check(job) == []
    return send(job, to, Ledger(tmp_path / "ledger"), wait_s=1.0)


def read(server, job, plural="trainjobs"):
    return server.objects["team", plural, job.name]


@pytest.mark.parametrize("api", ["trainjob", "pytorchjob"])
def test_a_job_is_created_with_what_its_pods_wait_for(api, cluster, tmp_path):
    plural = f"{api}s"
    job = a_job(tmp_path, nodes=2, options={"api": api})
    found = sent(job, tmp_path)
    assert found.id == f"team/{job.name}"
    assert [one for one, _ in cluster.posts] == [plural, "configmaps", "secrets"]
    made = read(cluster, job, plural)
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
    job = a_job(tmp_path, options={"volumes": "runs:/runs", "queue": "batch"})
    write(job, to := target_of("kubernetes"))
    missing = [
        "there is no PersistentVolumeClaim runs in team",
        "there is no LocalQueue batch of Kueue in team",
    ]
    assert to.check(job) == missing
    cluster.fail["trainjobs"] = 403
    assert to.check(job) == ["no one may create these here", *missing]
    assert cluster.posts == []
    cluster.objects["team", "localqueues", "batch"] = {}
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


@pytest.mark.parametrize("how", ["dropped", "broken"])
@pytest.mark.parametrize("plural", ["trainjobs", "configmaps", "secrets"])
def test_a_lost_answer_makes_no_second_job_and_leaves_nothing_out(plural, how, cluster, tmp_path):
    cluster.fail[plural] = how
    job = a_job(tmp_path, nodes=2)
    write(job, to := target_of("kubernetes"))
    ledger = Ledger(tmp_path / "ledger")
    found = send(job, to, ledger, wait_s=5.0)
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
        send(job, to, Ledger(tmp_path / "ledger"))
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
        name = pod(cluster, job, number, "")
        ended = {"exitCode": code, "finishedAt": f"2026-11-26T{at}:00Z"}
        status = {"name": "node", "ready": False, "restartCount": 0, "image": "a", "imageID": "b",
                  "state": {"terminated": ended}}  # fmt: skip
        began = f"2026-11-26T09:0{number}:00Z"
        told = {"containerStatuses": [status], "startTime": began}
        cluster.objects["team", "pods", name]["status"] = told
    found = target_of("kubernetes").state(id, job.folder)
    assert (found.exit_code, found.since_s) == (7, 3900.0)


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ([], State.queued),
        (["Created"], State.starting),
        (["Created", "Running"], State.running),
        (["Created", "Running", "Restarting"], State.requeued),
        (["Created", "Running", "Succeeded"], State.succeeded),
        (["Created", "Failed"], State.failed),
    ],
)
def test_states_of_a_pytorch_job(conditions, state, cluster, tmp_path):
    job = a_job(tmp_path, options={"api": "pytorchjob"})
    id = sent(job, tmp_path).id
    read(cluster, job, "pytorchjobs")["status"] = {
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": f"2026-11-26T10:0{n}:00Z"}
            for n, kind in enumerate(conditions)
        ]
    }
    assert target_of("kubernetes").state(id, job.folder).state == state


def pod(cluster, job, number, text):
    name = f"{job.name}-node-0-{number}-abcde"
    labels = {"jobset.sigs.k8s.io/jobset-name": job.name}
    meta = {"name": name, "namespace": "team", "labels": labels}
    cluster.objects["team", "pods", name] = {"metadata": meta}
    cluster.logs[name] = text
    return name


@pytest.mark.parametrize("follow", [False, True])
def test_logs_of_all_pods(follow, cluster, tmp_path):
    job = a_job(tmp_path, nodes=2)
    id = sent(job, tmp_path).id
    to = target_of("kubernetes")
    with pytest.raises(SubmitError, match="has no pods"):
        list(to.logs(id, job.folder, follow=follow))
    first = pod(cluster, job, 0, "epoch 1\nü\nlast")
    assert "".join(to.logs(id, job.folder, follow=follow)) == "epoch 1\nü\nlast"
    second = pod(cluster, job, 1, "Traceback\n")
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


def test_what_works_in_place_of_top(cluster, tmp_path):
    job = a_job(tmp_path)
    with pytest.raises(SubmitError, match="does not look into pods") as no:
        target_of("kubernetes").top(sent(job, tmp_path).id, job.folder, "key")
    assert no.value.do.startswith("kubectl exec -n team -it POD -c node -- flatout top")


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
@pytest.mark.parametrize("api", ["trainjob", "pytorchjob"])
def test_kubectl_applies_what_was_written(api, cluster, tmp_path):
    """By hand, as the page says, with every field checked by the server."""
    job = a_job(tmp_path, nodes=2, options={"api": api})
    write(job, target_of("kubernetes"))
    applied = ["kubectl", "apply", "--validate=strict", "-f", str(job.folder / "job.yaml")]
    for more in (["--dry-run=server"], []):
        done = subprocess.run([*applied, *more], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert job.name in done.stdout
    assert ("team", f"{api}s", job.name) in cluster.objects
    sent = [query for plural, query in cluster.asked if plural == f"{api}s"]
    assert all(query["fieldValidation"] == ["Strict"] for query in sent)
    path = job.folder / "job.yaml"
    path.write_text(path.read_text().replace("\nspec:", "\nspec:\n  typo: 3", 1))
    cluster.objects.clear()
    done = subprocess.run(applied, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "is invalid" in done.stderr
    assert ("team", f"{api}s", job.name) not in cluster.objects
