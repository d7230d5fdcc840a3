"""Finds data that a script would send to other machines, in its code, before it runs.

The search covers the script and the modules in its folder that it imports, directly or not. A name
that a file imports is followed to its module (`import boto3 as b; b.client(...)`). A method is
recognized by its name alone (`model.push_to_hub()`). Choices at run time are not found.
So this list only informs the user in advance. A trial is kept from sending by guard.py and by the
offline modes of loggers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Words by the beginning of the dotted name of a call.
_CALLS = {
    "wandb.init": "logs to Weights & Biases",
    "mlflow.": "logs to MLflow",
    "comet_ml.": "logs to Comet",
    "neptune.": "logs to Neptune",
    "clearml.Task": "logs to ClearML",
    "swanlab.init": "logs to SwanLab",
    "trackio.init": "logs to Trackio",
    "lightning.pytorch.loggers.WandbLogger": "logs to Weights & Biases",
    "pytorch_lightning.loggers.WandbLogger": "logs to Weights & Biases",
    "lightning.pytorch.loggers.CometLogger": "logs to Comet",
    "pytorch_lightning.loggers.CometLogger": "logs to Comet",
    "lightning.pytorch.loggers.NeptuneLogger": "logs to Neptune",
    "pytorch_lightning.loggers.NeptuneLogger": "logs to Neptune",
    "lightning.pytorch.loggers.MLFlowLogger": "logs to MLflow",
    "pytorch_lightning.loggers.MLFlowLogger": "logs to MLflow",
    "huggingface_hub.HfApi": "uses the Hugging Face hub",
    "huggingface_hub.upload": "uploads to the Hugging Face hub",
    "huggingface_hub.create": "changes the Hugging Face hub",
    "huggingface_hub.delete": "changes the Hugging Face hub",
    "requests.": "sends an HTTP request",
    "httpx.": "sends an HTTP request",
    "aiohttp.": "sends an HTTP request",
    "urllib.request.": "sends an HTTP request",
    "urllib3.": "sends an HTTP request",
    "http.client.HTTP": "sends an HTTP request",
    "boto3.": "uses AWS",
    "botocore.": "uses AWS",
    "s3fs.": "uses S3",
    "gcsfs.": "uses Google Cloud Storage",
    "google.cloud.": "uses Google Cloud",
    "adlfs.": "uses Azure storage",
    "azure.": "uses Azure",
    "minio.": "uses an object store",
    "fsspec.filesystem": "may use a remote file system",
    "paramiko.": "connects by SSH",
    "fabric.": "connects by SSH",
    "ftplib.": "connects by FTP",
    "smtplib.": "sends mail",
    "websocket.": "opens a web socket",
    "redis.": "uses Redis",
    "pymongo.": "uses MongoDB",
    "psycopg2.connect": "uses PostgreSQL",
    "psycopg.connect": "uses PostgreSQL",
    "socket.create_connection": "opens a connection",
}
_METHODS = {
    "push_to_hub": "uploads to the Hugging Face hub",
    "upload_file": "uploads a file",
    "upload_fileobj": "uploads a file",
    "upload_folder": "uploads a folder",
    "upload_from_filename": "uploads a file",
    "put_object": "writes to an object store",
    "log_artifact": "uploads what it has logged",
}
# Words by keyword arguments that make a trainer report or upload.
_KEYWORDS = {"push_to_hub": "uploads to the Hugging Face hub"}
_SHELLS = (
    *("subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
    *("subprocess.Popen", "subprocess.getoutput", "os.system", "os.popen"),
)
_PROGRAMS = (
    *("aws", "gsutil", "gcloud", "azcopy", "az", "rclone", "s5cmd", "scp", "sftp", "rsync", "ssh"),
    *("curl", "wget", "hf", "huggingface-cli", "wandb", "mail", "sendmail"),
)
_REMOTE = re.compile(r"^(s3|s3a|gs|gcs|abfss?|az|hdfs|hf|sftp|ftp|webdav)://")
_MOST_FILES = 200


class Sends(NamedTuple):
    """A place in the code that would send data to other machines.

    Attributes:
        file: the script as given, or a module in its folder.
        line: line number, from 1.
        what: description of the action, in a few words.
    """

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} ({self.file}:{self.line})"


def find_sends(script: Path) -> list[Sends]:
    """Return the places in a script and its modules that would send data to other machines.

    A file that cannot be read or parsed is skipped, since Python reports the error.
    """
    sends: list[Sends] = []
    waiting, result = [script], {script.resolve()}
    while waiting and len(result) <= _MOST_FILES:
        file = waiting.pop(0)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, ValueError, SyntaxError):
            continue
        sends += _in_tree(tree, str(file))
        for other in _imported(tree, file, script.parent):
            if other.resolve() not in result:
                result.add(other.resolve())
                waiting.append(other)
    return sends


def _in_tree(tree: ast.Module, file: str) -> list[Sends]:
    names = dict(_names(tree))
    places: dict[tuple[int, str], Sends] = {}
    for node in ast.walk(tree):
        what = ""
        if isinstance(node, ast.Call):
            what = _of_call(node, names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            remote = _REMOTE.match(node.value)
            what = f"names a place beyond this machine, {node.value}" if remote else ""
        if what and isinstance(node, (ast.Call, ast.Constant)):
            places[node.lineno, what] = Sends(file, node.lineno, what)
    return sorted(places.values(), key=lambda value: value.line)


def _of_call(call: ast.Call, names: dict[str, str]) -> str:
    called = _dotted(call.func, names)
    if called in _SHELLS:
        program = _program(call)
        return f"runs {program}" if program in _PROGRAMS else ""
    for start, what in _CALLS.items():
        if called == start or called.startswith(start):
            return what
    if isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS:
        return _METHODS[call.func.attr]
    for keyword in call.keywords:
        is_on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if is_on and keyword.arg in _KEYWORDS:
            return _KEYWORDS[keyword.arg]
    return ""


def _program(call: ast.Call) -> str:
    if not call.args:
        return ""
    first = call.args[0]
    if isinstance(first, (ast.List, ast.Tuple)) and first.elts:
        first = first.elts[0]
    if isinstance(first, ast.JoinedStr) and first.values:
        first = first.values[0]
    if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
        return ""
    words = first.value.split()
    return Path(words[0]).name if words else ""


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    return ".".join([names[node.id], *reversed(parts)])


def _names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _imported(tree: ast.Module, file: Path, root: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [(root, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else root
            start = f"{node.module}." if node.module else ""
            modules = [(base, f"{start}{alias.name}") for alias in node.names]
            modules += [(base, node.module)] if node.module else []
        else:
            continue
        for base, name in modules:
            path = base.joinpath(*name.split("."))
            for item in (path.with_suffix(".py"), path / "__init__.py"):
                if item.is_file():
                    yield item
