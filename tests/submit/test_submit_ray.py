"""A Ray cluster of two nodes on this machine, one of which is killed in the middle of a job."""

import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from examples_as_jobs import EXAMPLES, check, example
from jobs import until
from prepared import check as check_prepared
from prepared import command, kill_in_the_middle, small_files
from submit_schemas import a_job
from world_ranks import free_port

import flatout
from flatout.errors import SubmitError
from flatout.submit import Ledger
from flatout.submit.code import CodeArchive
from flatout.submit.ray import Ray, _words
from flatout.submit.send import send_once, write
from flatout.submit.target import State, target_of

pytestmark = pytest.mark.slow

TRAIN = """
import sys
import time
from pathlib import Path

import torch
import flatout
from flatout.recipe import Recipe, Save
from flatout.world import place


class Slow(flatout.Callback):
    def on_step(self, state):
        most = 0.05 if Path(sys.argv[1], "hurry").exists() else 60
        time.sleep(min(float(sys.argv[2]), most))
        Path(sys.argv[1], f"step-{place().rank}").write_text(str(state.step))


torch.manual_seed(0)
x = torch.randn(256, 8)
y = (x.sum(1) > 0).long()
model = torch.nn.Linear(8, 2)
trainer = flatout.Trainer(
    model, loss="cross_entropy", lr=0.1, allow="exact", recipe=Recipe(save=Save(every=5))
)
trainer.fit((x, y), batch_size=16, epochs=3, callbacks=[Slow()])
if place().rank == 0:
    torch.save((place().world_size, model.state_dict()), Path(sys.argv[1], "weights.pt"))
"""


def environment(**more):
    """So that nodes find the flatout that is tested."""
    source = os.pathsep.join([str(Path(flatout.__file__).parents[1]), *filter(None, sys.path)])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PYTHONPATH": source, "PATH": path, **more}


def a_ray_job(folder, pause, **changes):
    root = folder / "code"
    root.mkdir(parents=True)
    (root / "train.py").write_text(TRAIN)
    (root / "lib").mkdir()
    (root / "lib" / "model.py").write_text("")
    return a_job(
        folder, "ray", nodes=2, checkpoint=str(folder / "run"),
        arguments=(str(folder), str(pause)),
        environment=environment(FLATOUT_CACHE=str(folder / "cache")), **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs, and two nodes."""
    pytest.importorskip("ray.train", exc_type=ImportError)
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(RAY_DEDUP_LOGS="0").items():
            patch.setenv(name, value)
        has_server = importlib.util.find_spec("opencensus") is not None  # ray[default]
        head = {"num_cpus": 0, "include_dashboard": has_server, "dashboard_port": free_port()}
        made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        made.workers = [made.add_node(num_cpus=1) for _ in range(2)]
        yield made
        made.shutdown()


def variables(cluster):
    """As the job server sets them for a driver."""
    config = {"runtime_env": {"env_vars": {"FLATOUT_SUBMITTED": "key"}}, "metadata": {}}
    given = {"RAY_ADDRESS": cluster.address, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(config)}
    return {**os.environ, **given}


@contextmanager
def driving(job, cluster, log):
    """Runs a job's driver as the job server would."""
    write(job, target_of("ray"))
    with log.open("w") as out:
        run = subprocess.Popen(
            [sys.executable, "driver.py"], cwd=job.folder, stdout=out, stderr=out,
            env=variables(cluster),
        )  # fmt: skip
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def test_a_job_ends_right_though_a_node_is_killed_in_the_middle(cluster, tmp_path):
    import torch

    log, steps = tmp_path / "log", tmp_path / "step-0"
    with driving(a_ray_job(tmp_path, 2.0, retries=2), cluster, log) as run:
        until(lambda: run.poll() is not None or steps.exists())
        (tmp_path / "hurry").touch()
        until(
            lambda: run.poll() is not None or (steps.exists() and int(steps.read_text() or 0) > 12)
        )
        assert run.poll() is None, log.read_text()
        cluster.remove_node(cluster.workers.pop(), allow_graceful=False)
        cluster.workers.append(cluster.add_node(num_cpus=1))
        assert run.wait(120) == 0, log.read_text()
    size, weights = torch.load(tmp_path / "weights.pt")
    assert size == 2
    assert "resumed step" in log.read_text()
    undisturbed = plain(tmp_path / "plain")
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)


@pytest.mark.long
def test_a_script_that_fails_by_itself_is_not_started_again(cluster, tmp_path):
    job = a_ray_job(tmp_path, 0, retries=2)
    (job.root / "train.py").write_text("raise SystemExit(7)")
    with driving(job, cluster, tmp_path / "log") as run:
        assert run.wait(120) == 7
    assert (tmp_path / "log").read_text().count("Started training worker group") == 1


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples(name, cluster, tmp_path):
    job = a_ray_job(tmp_path, 0)
    files, (script, *arguments) = example(name, job.root, tmp_path / "shared")
    code = CodeArchive(tuple(files), 1)
    job = replace(job, script=script, arguments=tuple(arguments), code=code)
    with driving(job, cluster, tmp_path / "log") as run:
        assert run.wait(240) == 0, (tmp_path / "log").read_text()
    check(name, (tmp_path / "log").read_text(), tmp_path / "shared")


@pytest.mark.long
def test_preparing_data_goes_on_where_it_was_killed(cluster, tmp_path):
    source, target = small_files(tmp_path / "parts"), tmp_path / "day" / "day.tfrecord"
    words = tuple(command(source, target)[1:])
    job = replace(
        a_ray_job(tmp_path, 0, retries=1),
        nodes=1,
        script="flatout",
        arguments=words,
        code=CodeArchive((), 0),
    )
    with driving(job, cluster, tmp_path / "log") as run:
        written = kill_in_the_middle(target)
        assert run.wait(240) == 0, (tmp_path / "log").read_text()
    check_prepared(source, target, written)


@pytest.mark.long
def test_the_job_server_takes_jobs_tells_of_them_and_stops_them(cluster, tmp_path):
    if not cluster.webui_url:
        pytest.skip("the job server is of ray[default]")
    to, options = target_of("ray"), {"address": f"http://{cluster.webui_url}"}
    short = a_ray_job(tmp_path / "short", 0, options=options, name="short")
    (short.root / "train.py").write_text("print('trained')")
    long = a_ray_job(tmp_path / "long", 2.0, options=options, name="long")
    for job in (short, long):
        write(job, to)
        assert to.check(job) == []
    assert to.send(short, "k1").id == "short"
    assert to.check(short) == ["there is a job short already: choose another --name"]
    said = "".join(to.logs("short", short.folder, follow=True))
    assert said.count("trained") == 2, said
    found = to.state("short", short.folder)
    assert (found.state, found.exit_code) == (State.succeeded, 0)
    assert to.find("k1", short.folder).id == "short"
    assert to.find("k2", short.folder) is None
    to.send(long, "k2")
    until(lambda: to.state("long", long.folder).state == State.running, 240)
    with pytest.raises(SubmitError, match="cannot be entered"):
        to.top("long", long.folder, "k2")
    to.cancel("long", long.folder)
    until(lambda: to.state("long", long.folder).state == State.canceled)
    assert to.state("absent", long.folder).state == State.lost


class JobServer(http.server.BaseHTTPRequestHandler):
    """Takes jobs as Ray's job server does, and answers as its server's `how` says."""

    def do_POST(self):
        taken = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.jobs.append(
            {key: taken[key] for key in ("submission_id", "entrypoint", "metadata")}
            | {"type": "SUBMISSION", "status": "RUNNING"}
        )
        if self.server.how == "silent":
            self.server.awake.wait(60)
        elif self.server.how == "broken":
            self.send_error(500)

    def do_GET(self):
        self.server.asked[self.path] = self.server.asked.get(self.path, 0) + 1
        if self.server.asked[self.path] == 1:
            return  # the first time it says nothing
        is_jobs = self.path.startswith("/api/jobs")
        answer = self.server.jobs if is_jobs else {"version": "4", "ray_version": "2.60.0"}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments):
        pass


@pytest.mark.parametrize("how", ["silent", "dropped", "broken"])
def test_one_yes_is_one_job_though_the_job_server_does_not_answer(how, tmp_path):
    pytest.importorskip("ray.job_submission")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), JobServer) as server:
        server.how, server.jobs, server.asked, server.awake = how, [], {}, threading.Event()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = {"address": f"http://127.0.0.1:{server.server_port}"}
        made, to = a_job(tmp_path, "ray", options=address), Ray((5, 0.5), 0.0)
        write(made, to)
        assert to.check(made) == []
        sent = send_once(made, to, Ledger(), wait_s=5.0)
        server.awake.set()
        server.shutdown()
    assert [one["submission_id"] for one in server.jobs] == [sent.id] == [made.name]


# What Ray says of jobs that fail, by its own names for the errors.
FAILED = [
    (
        "JOB_ENTRYPOINT_COMMAND_ERROR",
        "Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 "
        "chars):\nTraceback (most recent call last):\n  File ...\n\x1b[31mValueError: no\x1b[0m\n",
        "FAILED (its driver ended with exit code 1: ValueError: no)",
    ),
    (
        "JOB_SUPERVISOR_ACTOR_START_FAILURE",
        "Failed to start supervisor actor a: 'x'. Full traceback:\nTraceback (most recent call "
        "last):\n  File ...\nRuntimeError: no port\n",
        "FAILED (its driver was not started: RuntimeError: no port)",
    ),
    ("RUNTIME_ENV_SETUP_FAILURE", "", "FAILED (a node could not lay out the job's folder)"),
    ("SOMETHING_NEW", "it broke", "FAILED (it broke)"),
    (None, None, "FAILED"),
]


@pytest.mark.parametrize(("error", "message", "words"), FAILED)
def test_failures_are_told_in_a_line(error, message, words):
    pytest.importorskip("ray.job_submission")
    from ray.job_submission import JobDetails

    given = {"type": "SUBMISSION", "entrypoint": "python driver.py", "status": "FAILED"}
    found = JobDetails(**given, error_type=error, message=message, driver_exit_code=1)
    assert _words("FAILED", found) == words
    assert _words("RUNNING", found) == "RUNNING"


def plain(folder):
    """The weights of the same script on two ranks of this machine, undisturbed."""
    import torch

    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    call = [sys.executable, "-c", "from flatout.cli.main import main; main()"]
    subprocess.run(
        [*call, "run", "--devices", "2", "train.py", str(folder), "0"], cwd=folder, check=True,
        env={**os.environ, **environment()}, capture_output=True, timeout=120,
    )  # fmt: skip
    return torch.load(folder / "weights.pt")[1]
