"""A server that answers as the API server of Kubernetes does; its pods are processes here.

It checks what it is sent by the schemas of Kubeflow's resources, and keeps no more than that.
"""

import http.server
import json
import re
import sys
import threading
import urllib.parse
from contextlib import contextmanager

import yaml
from submit_schemas import CRDS, validator

OBJECT = re.compile(
    r"/(?:api/v1|apis/trainer\.kubeflow\.org/v1alpha1)"
    r"/namespaces/(?P<space>[^/]+)"
    r"/(?P<plural>\w+)(?:/(?P<name>[^/]+))?(?P<of>/log)?"
)
KINDS = {
    "trainjobs": "TrainJob",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
}
# What the server has, by where: plural, kind.
RESOURCES = {
    "api/v1": [("configmaps", "ConfigMap"), ("secrets", "Secret")],
    "apis/trainer.kubeflow.org/v1alpha1": [("trainjobs", "TrainJob")],
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
        if kind == "TrainJob" and CRDS.is_dir():
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
        if space != "team":
            return self.status(404, f'namespaces "{space}" not found')
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
        if at["of"] == "/log":
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


@contextmanager
def api_server(folder):
    """A server, and the file by which kubectl's clients find it."""
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
    (folder / "config").write_text(yaml.safe_dump(config))
    yield server, str(folder / "config")
    server.shutdown()
    server.server_close()


def add_pod(server, job, number, text="", **status):
    """A pod of a job, what its container prints, and its status."""
    name = f"{job.name}-node-0-{number}-abcde"
    labels = {"jobset.sigs.k8s.io/jobset-name": job.name}
    meta = {"name": name, "namespace": "team", "labels": labels}
    server.objects["team", "pods", name] = {"metadata": meta, "status": status}
    server.logs[name] = text
    return name


def kubectl(folder, variables):
    """A folder with a kubectl whose `exec` runs a command here, with the variables of its pod."""
    folder.mkdir()
    (folder / "pods.json").write_text(json.dumps(variables))
    (folder / "kubectl").write_text(KUBECTL.format(python=sys.executable, folder=folder))
    (folder / "kubectl").chmod(0o755)
    return str(folder)


KUBECTL = """#!{python}
import json, os, sys
from pathlib import Path

what, _, space, pod, _, container, _, *command = sys.argv[1:]
assert (what, space, container) == ("exec", "team", "node"), sys.argv
variables = json.loads(Path("{folder}/pods.json").read_text())[pod]
os.execvpe(command[0], command, variables)
"""
