"""The manifests of a job for Kubernetes: a TrainJob, and a ConfigMap with the code.

https://www.kubeflow.org/docs/components/trainer
"""

from __future__ import annotations

import base64
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.errors import SubmitError
from flatout.masked import masked
from flatout.measure import SUBMITTED
from flatout.recipe import dumps
from flatout.submit.client import require
from flatout.submit.job import Job
from flatout.submit.target import options_of, refuse

Manifest = dict[str, Any]

OPTIONS = (
    *("image", "namespace", "runtime", "code", "volumes", "memory", "gpu", "interface"),
    *("node-selector", "tolerations", "service-account", "pull-secret", "queue"),
)
EXTRA = "kubernetes"
KEY = "flatout/key"
SECRET = "FLATOUT_SECRET"
# _MOUNTED: the path of the mounted ConfigMap. _COPY: the path of a writable copy of it.
_MOUNTED, _COPY = "/flatout", "/tmp/flatout"
_CODE_VOLUME = "flatout-code"
# The limit of a ConfigMap, and Kubernetes' own limits of names.
_MOST_BYTES = 1 << 20
_LONGEST_IMAGE, _LONGEST_KEY = 500, 253
# A TrainJob's pods get "NAME-node-0-0" as their host's name, which is a label too.
_LONGEST_NAME = 50
_NO_KEY = re.compile(r"[^-._a-zA-Z0-9]")
# Texts that YAML 1.1 or 1.2 reads as a number, a time, a truth value or nothing.
_NOT_PLAIN = re.compile(
    r"|[-+]?\.?[0-9].*|[-+]?\.(inf|nan)|y|n|yes|no|on|off|true|false|null|~|=|<<", re.IGNORECASE
)
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


@dataclass(frozen=True)
class Volume:
    """The name of a PersistentVolumeClaim, and its path in the container."""

    claim: str
    path: str
    read_only: bool = False

    def holds(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path.rstrip('/')}/")


def manifests(job: Job) -> list[Manifest]:
    """Return the job, and before it the ConfigMap of its code and Recipe, if it has any."""
    options = options_of(job, OPTIONS)
    volumes = volumes_of(options.get("volumes", ""))
    refuse(_problems(job, options, volumes), where="flatout submit kubernetes")
    config_map, items = _config_map(job, options)
    return [*([config_map] if config_map else []), _train_job(job, options, volumes, items)]


def add_key(manifest: Manifest, key: str) -> None:
    """Put a key into a TrainJob's labels, and into its ranks' variables for `flatout top`."""
    manifest["metadata"].setdefault("labels", {})[KEY] = key
    trainer = manifest["spec"].setdefault("trainer", {})
    others = [item for item in trainer.get("env") or () if item["name"] != SUBMITTED]
    trainer["env"] = [*others, {"name": SUBMITTED, "value": key}]


def yaml_of(documents: Sequence[Manifest]) -> str:
    yaml = require("yaml", EXTRA)

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: Any, data: str) -> Any:
        style = "|" if "\n" in data else "'" if _NOT_PLAIN.fullmatch(data) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Dumper.add_representer(str, text)
    dumped: str = yaml.dump_all(
        documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=2**20
    )
    return dumped


def volumes_of(text: str) -> list[Volume]:
    volumes = []
    for part in filter(None, text.split(",")):
        claim, _, rest = part.partition(":")
        path, _, mode = rest.partition(":")
        if not claim or not path.startswith("/") or mode not in ("", "ro", "rw"):
            raise SubmitError(
                f"expected volumes as CLAIM:/path or CLAIM:/path:ro, found {part!r}",
                where="--option volumes",
            )
        volumes.append(Volume(claim, os.path.normpath(path), mode == "ro"))
    return volumes


def escape_variables(text: str) -> str:
    """Escape text of a command or a variable, in which Kubernetes expands `$(NAME)`."""
    return text.replace("$", "$$")


# -- what is wrong -------------------------------------------------------------------------------


def _problems(job: Job, options: Mapping[str, str], volumes: Sequence[Volume]) -> list[str]:
    image = options.get("image", "")
    code = options.get("code", "")
    problems = []
    if not image:
        problems.append(
            "no image: --option image=REGISTRY/NAME:TAG, with Flatout and what it needs"
        )
    if len(image) > _LONGEST_IMAGE or any(letter.isspace() for letter in image):
        problems.append(f"expected an image of at most {_LONGEST_IMAGE} letters, found {image!r}")
    if code and not code.startswith("/"):
        problems.append(f"expected code=/a/path/in/the/container, found {code!r}")
    if len(job.name) > _LONGEST_NAME:
        problems.append(
            f"{job.name} has {len(job.name)} letters: hosts that are named after it would have "
            f"more than 63; choose a --name of at most {_LONGEST_NAME}"
        )
    if job.is_auto and not job.has_measured_threads:
        problems.append("--devices auto takes the CPUs of a node: say how many with --threads N")
    problems += [
        f"{name!r} is no name of a variable that Kubernetes allows"
        for name in job.environment
        if not _VARIABLE.fullmatch(name)
    ]
    problems += _bad_text(job)
    if job.checkpoint is not None and not _is_kept(job.checkpoint, volumes):
        problems.append(
            f"no node can keep {job.checkpoint}: put it on a volume, as in --option "
            "volumes=CLAIM:/runs --checkpoints /runs/NAME, or give a URL such as s3://bucket/run"
        )
    return problems


def _bad_text(job: Job) -> list[str]:
    result = []
    for item in (job.script, *job.arguments, *job.environment.values()):
        try:
            item.encode()
        except UnicodeEncodeError:
            result.append(f"Kubernetes takes no bytes that are not UTF-8; found {item!r}")
    return result


def _is_kept(path: str, volumes: Sequence[Volume]) -> bool:
    return "://" in path or any(volume.holds(path) and not volume.read_only for volume in volumes)


def unseen(job: Job) -> list[str]:
    """Return the inputs that no pod finds: those that are no URL, on no volume, and no code."""
    volumes = volumes_of(job.options.get("volumes", ""))
    result = []
    for item in job.inputs:
        if item.is_url or item.travels or any(volume.holds(item.path) for volume in volumes):
            continue
        result.append(
            f"{item.given} lies on {item.lies_on}, which no pod sees; put it on a "
            "PersistentVolumeClaim that is mounted at its path, --option "
            f"volumes=CLAIM:{os.path.dirname(item.path)}, or give the URL of an object store"
        )
    return result


# -- the parts of a job --------------------------------------------------------------------------


def _config_map(job: Job, options: Mapping[str, str]) -> tuple[Manifest | None, list[Manifest]]:
    contents = {} if job.recipe is None else {"recipe.toml": os.fsencode(dumps(job.recipe))}
    if "code" not in options and not job.is_command:
        contents |= {f"code/{name}": (job.root / name).read_bytes() for name in job.code.files}
    total = sum(map(len, contents.values()))
    if total > _MOST_BYTES:
        raise SubmitError(
            f"expected code of at most 1 MiB, which is what a ConfigMap takes; found {job.code}",
            where=str(job.root),
            do="name in .gitignore what is no code; or build the code into the image, or put it on "
            "a volume, and say where it lies: --option code=/path",
        )
    if not contents:
        return None, []
    made: Manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, options),
        "immutable": True,
    }
    items: list[Manifest] = []
    for path, data in contents.items():
        key = _key(path, {item["key"] for item in items})
        try:
            made.setdefault("data", {})[key] = _text(data)
        except ValueError:
            made.setdefault("binaryData", {})[key] = base64.b64encode(data).decode()
        items.append({"key": key, "path": path})
    return made, items


def _text(data: bytes) -> str:
    text = data.decode()
    if not all(letter.isprintable() or letter in "\n\t" for letter in text):
        raise ValueError("not printable")
    return text


def _key(path: str, taken: set[str]) -> str:
    name = _NO_KEY.sub("_", path)[: _LONGEST_KEY - 8]
    for number in range(len(taken) + 1):
        key = f"{name}.{number}" if number else name
        if key not in taken:
            break
    return key


def _metadata(job: Job, options: Mapping[str, str]) -> Manifest:
    notes = {"flatout/command": shlex.join(masked(job.command))}
    if job.fingerprint:
        notes["flatout/recipe-fingerprint"] = job.fingerprint
    made: Manifest = {"name": job.name}
    if "namespace" in options:
        made["namespace"] = options["namespace"]
    labels = {"app.kubernetes.io/managed-by": "flatout"}
    if "queue" in options:
        labels["kueue.x-k8s.io/queue-name"] = options["queue"]
    return {**made, "labels": labels, "annotations": notes}


def _in_its_folder(job: Job, options: Mapping[str, str]) -> tuple[list[str], str]:
    run = 'exec "$@"'
    if job.is_command:
        return [], f"{_MOUNTED}/recipe.toml"
    if "code" in options:
        shell = f"cd {shlex.quote(options['code'])} && {run}"
        return ["/bin/sh", "-c", shell, "sh"], f"{_MOUNTED}/recipe.toml"
    # A ConfigMap is read-only, and a script may write into its own folder.
    shell = f"cp -rL {_MOUNTED}/. {_COPY} && cd {_COPY}/code && {run}"
    return ["/bin/sh", "-c", shell, "sh"], "../recipe.toml"


def _environment(job: Job, options: Mapping[str, str]) -> list[Manifest]:
    variables = {"PYTHONUNBUFFERED": "1", **job.environment}
    if "interface" in options:
        variables.setdefault("GLOO_SOCKET_IFNAME", options["interface"])
    env: list[Manifest] = [
        {"name": name, "value": escape_variables(value)} for name, value in variables.items()
    ]
    if job.nodes > 1 and SECRET not in job.environment:
        # Made when the job is sent; without it the nodes meet too, and say that anyone could.
        reference = {"name": job.name, "key": SECRET, "optional": True}
        env.append({"name": SECRET, "valueFrom": {"secretKeyRef": reference}})
    return env


def _resources(job: Job, options: Mapping[str, str]) -> Manifest:
    amounts = {"cpu": str(job.cpus)}
    if "memory" in options:
        amounts["memory"] = options["memory"]
    if job.gpus:
        amounts[options.get("gpu", "nvidia.com/gpu")] = str(job.gpus)
    return {"requests": amounts, "limits": dict(amounts)}


def _mounts(volumes: Sequence[Volume], items: Sequence[Manifest]) -> list[Manifest]:
    mounts: list[Manifest] = []
    if items:
        mounts.append({"name": _CODE_VOLUME, "mountPath": _MOUNTED, "readOnly": True})
    for number, item in enumerate(volumes):
        mount: Manifest = {"name": f"volume-{number}", "mountPath": item.path}
        mounts.append({**mount, "readOnly": True} if item.read_only else mount)
    return mounts


def _pod(
    job: Job, options: Mapping[str, str], volumes: Sequence[Volume], items: list[Manifest]
) -> Manifest:
    pod: Manifest = {"terminationGracePeriodSeconds": job.stop_ahead_s}
    if "service-account" in options:
        pod["serviceAccountName"] = options["service-account"]
    if "pull-secret" in options:
        pod["imagePullSecrets"] = [{"name": options["pull-secret"]}]
    if "node-selector" in options:
        pod["nodeSelector"] = dict(_pairs(options["node-selector"], "node-selector"))
    if "tolerations" in options:
        pod["tolerations"] = list(map(_toleration, options["tolerations"].split(",")))
    sources: list[Manifest] = []
    if items:
        sources.append({"name": _CODE_VOLUME, "configMap": {"name": job.name, "items": items}})
    for number, item in enumerate(volumes):
        claim = {"claimName": item.claim}
        sources.append({"name": f"volume-{number}", "persistentVolumeClaim": claim})
    return {**pod, **({"volumes": sources} if sources else {})}


def _pairs(text: str, option: str) -> list[tuple[str, str]]:
    parts = [item.partition("=") for item in text.split(",")]
    if not all(name and equals for name, equals, _ in parts):
        raise SubmitError(f"expected NAME=VALUE,..., found {text!r}", where=f"--option {option}")
    return [(name, value) for name, _, value in parts]


def _toleration(text: str) -> Manifest:
    head, _, effect = text.partition(":")
    name, equals, value = head.partition("=")
    if not name or effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
        raise SubmitError(
            f"expected KEY, KEY:EFFECT or KEY=VALUE:EFFECT, found {text!r}",
            where="--option tolerations",
        )
    made = {"key": name, "operator": "Equal" if equals else "Exists"}
    return {
        **made,
        **({"value": value} if equals else {}),
        **({"effect": effect} if effect else {}),
    }


def _train_job(
    job: Job, options: Mapping[str, str], volumes: Sequence[Volume], items: list[Manifest]
) -> Manifest:
    inside, recipe = _in_its_folder(job, options)
    ranks = job.devices_option if job.is_auto else []
    command = job.command_with(*ranks, recipe=recipe)
    trainer: Manifest = {
        "image": options["image"],
        **(
            {"command": list(map(escape_variables, inside))} if inside else {"command": command[:1]}
        ),
        "args": list(map(escape_variables, command if inside else command[1:])),
        "env": _environment(job, options),
        "numNodes": job.nodes,
        # Left out, a node without GPUs would get a process for each CPU.
        "numProcPerNode": job.devices,
        "resourcesPerNode": _resources(job, options),
    }
    pod = _pod(job, options, volumes, items)
    if mounts := _mounts(volumes, items):
        pod["containers"] = [{"name": "node", "volumeMounts": mounts}]
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    spec: Manifest = {
        "runtimeRef": _runtime(options.get("runtime", "torch-distributed")),
        "trainer": trainer,
        "runtimePatches": [{"manager": "flatout", "trainingRuntimeSpec": patch}],
    }
    if job.time_s is not None:
        spec["activeDeadlineSeconds"] = job.time_s
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, options),
        "spec": spec,
    }


def _runtime(name: str) -> Manifest:
    kind, _, own = name.rpartition("/")
    return {"name": own, **({"kind": "TrainingRuntime"} if kind else {})}
