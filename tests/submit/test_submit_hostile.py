"""Any text that a user or a Recipe gives stays a text in all artifacts of a job."""

import ast
import json
import os
import stat
import subprocess
import tarfile
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from submit_schemas import a_job

from flatout.errors import FlatoutError, SubmitError
from flatout.recipe import dumps, loads
from flatout.submit import target_of
from flatout.submit.code import CodeArchive
from flatout.submit.inputs import Input
from flatout.submit.send import artifacts_of

TARGETS = ("slurm", "ssh", "mpi", "kubernetes", "sagemaker", "ray")
# Programs that a script may call. The stubs do nothing.
STUBS = ("srun", "scontrol", "flatout", "mpirun", "python3", "timeout", "ssh")
ATTACKS = (
    "\ntouch $CANARY\n",
    "\r\ntouch $CANARY\r\n",
    "\x85touch $CANARY",
    "\u2028touch $CANARY\u2029",
    "`touch $CANARY`",
    "$(touch $CANARY)",
    "'; touch $CANARY #",
    '"; touch $CANARY #',
    "'\n'$(touch $CANARY)'",
    ") && touch $CANARY (",
    "\n#SBATCH --wrap=x",
    "\n---\nkind: Pod",
    "'''\nopen(CANARY, 'w')\n'''",
    "{seed}",
    "{{command}}",
    "\\",
    "\0",
    "\udcff",
    "${CANARY}",
    "²",
    "a[$(touch $CANARY)]",
)
HOSTILE = st.lists(
    st.one_of(st.sampled_from(ATTACKS), st.text(max_size=4), st.just("x")), min_size=1, max_size=3
).map("".join)

RECIPE = """
proven_for = "train.py"
[compute]
precision = "bf16"
[machine]
cpu = "Xeon"
cpus = 2
[choices."compute.precision"]
reason = "faster"
parity = "rounding"
"""

OWN = {
    "slurm": ("partition", "account", "bin"),
    "ssh": ("hosts", "rendezvous", "folder", "config", "bin"),
    "mpi": ("hosts", "port", "kind", "mpirun", "bin"),
    "kubernetes": (
        *("image", "namespace", "api", "runtime", "volumes", "memory", "gpu", "interface"),
        *("node-selector", "tolerations", "service-account", "pull-secret", "queue"),
    ),
    "sagemaker": ("image", "role", "instance", "bucket", "region", "volume-gb", "max-wait"),
    "ray": ("address", "storage"),
}


FIELDS = {
    "name": lambda job, text: {"name": text},
    "script": lambda job, text: {"script": text},
    "module": lambda job, text: {"script": text, "is_module": True},
    "arguments": lambda job, text: {"arguments": ("--a", text, f"--b={text}")},
    "settings": lambda job, text: {"settings": (text,)},
    "fingerprint": lambda job, text: {"fingerprint": text},
    "value of a variable": lambda job, text: {"environment": {"NAME": text}},
    "name of a variable": lambda job, text: {"environment": {text: "value"}},
    "checkpoint": lambda job, text: {"checkpoint": text},
    "shared": lambda job, text: {"shared": (text,)},
    "inputs": lambda job, text: {"inputs": (Input("data", f"/{text}"), Input(text, "/data"))},
    "folder": lambda job, text: {"folder": job.folder / text},
    "root": lambda job, text: {
        "root": job.root / text,
        "script": "flatout",
        "code": CodeArchive((), 0),
    },
    "machine of the Recipe": lambda job, text: {
        "recipe": job.recipe.model_copy(update={"machine": {"cpu": text}}),
        "fingerprint": text,
    },
    "name of an option": lambda job, text: {"options": {**job.options, text: "value"}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    stubs = folder / "stubs"
    stubs.mkdir()
    for name in STUBS:
        (stubs / name).write_text("#!/bin/sh\nexit 0\n")
        (stubs / name).chmod(0o755)
    (stubs / "sleep").write_text(
        "#!/bin/sh\nexit 1\n"
    )  # ends the background loop of a batch script
    (stubs / "sleep").chmod(0o755)
    return folder


def a_hostile_job(place, target, field, text):
    """Return a job with this text in one field; a FlatoutError refuses some texts."""
    options = {"bin": str(place / "stubs")} if target in ("slurm", "ssh", "mpi") else {}
    options |= {"hosts": "one,two"} if target in ("ssh", "mpi") else {}
    options |= {"storage": "/all"} if target == "ray" else {}
    where = "ray" if target in ("ssh", "mpi") else target
    job = replace(
        a_job(place, where, nodes=2, recipe=loads(RECIPE), options=options), shared=("/",)
    )
    if field in FIELDS:
        return replace(job, **FIELDS[field](job, text))
    return replace(job, options={**job.options, field: text})


def harmless(place, target, name):
    """Return an artifact of a job with a harmless text."""
    made = artifacts_of(a_hostile_job(place, target, "fingerprint", "Xeon"), target_of(target))
    (text,) = (artifact.text for artifact in made if artifact.name == name)
    return os.fsencode(text)


def check(place, target, field, text):
    """Assert that a text is refused, or that all artifacts keep the structure of a harmless one."""
    try:
        made = artifacts_of(a_hostile_job(place, target, field, text), target_of(target))
    except FlatoutError:
        return
    for artifact in made:
        data = os.fsencode(artifact.text)
        if artifact.name.endswith(".toml"):
            assert loads(artifact.text) == a_hostile_job(place, target, field, text).recipe
            assert dumps(loads(artifact.text)) == artifact.text
        elif artifact.name.endswith(".json"):
            json.loads(artifact.text)
        elif artifact.name.endswith(".yaml"):
            yaml = pytest.importorskip("yaml")
            kinds = [one["kind"] for one in yaml.safe_load_all(artifact.text)]
            assert kinds == ["ConfigMap", "TrainJob"]
        elif artifact.name.endswith(".py"):
            assert _shape_of(data) == _shape_of(harmless(place, target, artifact.name))
        elif data.startswith(b"#!/bin/bash"):
            if target == "slurm":
                _check_head(artifact.text, harmless(place, target, artifact.name).decode())
            _check_run(place, data)


def _shape_of(source):
    """Return the statements and calls of a script, without lists and dicts of texts."""
    tree = ast.parse(source)
    values = (ast.Constant, ast.List, ast.Dict, ast.Tuple)
    return [type(node).__name__ for node in ast.walk(tree) if not isinstance(node, values)]


def _check_head(script, harmless):
    """Assert that all lines before the first empty one are comments or known #SBATCH options."""
    head, other = (text.split("\n\n")[0].split("\n") for text in (script, harmless))
    assert all(line.startswith("#") for line in head)
    own = [line.split("=")[0].split()[1] for line in head if line.startswith("#SBATCH")]
    named = {line.split("=")[0].split()[1] for line in other if line.startswith("#SBATCH")}
    assert len(own) == len(set(own))
    assert len(set(own) - named) <= 1  # the option of this test
    assert not any(char in "\r\x85\u2028\u2029\x00" for line in head for char in line)


def _check_run(place, data):
    """Assert that bash runs the script to its end, and runs no part of a text as a command."""
    with_code = place / f"run-{os.urandom(4).hex()}"
    (with_code / "code").mkdir(parents=True)
    with tarfile.open(with_code / "code.tar.gz", "w:gz"):
        pass
    (with_code / "script").write_bytes(data)
    canary = with_code / "canary"
    variables = {
        "PATH": f"{place / 'stubs'}:/usr/bin:/bin",
        "CANARY": str(canary),
        "SLURM_JOB_ID": "1",
        "TMPDIR": str(with_code),
    }
    done = subprocess.run(
        ["bash", "script", "0"],
        cwd=with_code,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert b"syntax error" not in done.stderr, done.stderr
    assert not canary.exists(), data
    for path in with_code.glob("*"):
        mode = path.lstat().st_mode
        if not stat.S_ISDIR(mode):
            path.unlink()


CASES = [(target, field) for target in TARGETS for field in (*FIELDS, *OWN[target])]


@settings(max_examples=25)
@given(case=st.sampled_from(CASES), text=HOSTILE)
def test_a_text_stays_a_text_in_every_artifact(place, case, text):
    check(place, *case, text)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "field"), CASES)
def test_no_known_attack_has_an_effect(place, target, field):
    for text in ATTACKS:
        check(place, target, field, f"x{text}x")


@pytest.mark.parametrize(("target", "field"), [("mpi", "port"), ("ssh", "rendezvous")])
@pytest.mark.parametrize("port", ["²", "٣٣", "99999", "1 2"])
def test_a_port_is_a_number_in_ascii(place, target, field, port):
    text = port if field == "port" else f"host:{port}"
    with pytest.raises(SubmitError, match=field):
        target_of(target).artifacts(a_hostile_job(place, target, field, text))
