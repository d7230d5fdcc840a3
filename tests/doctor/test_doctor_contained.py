"""What a trial's processes cannot reach: other processes, other machines; and none outlives it."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager

import psutil
import pytest

from flatout.doctor.trials import landlock, own_network, step_sync
from flatout.doctor.trials.namespaces import NETWORK, PROCESSES
from flatout.doctor.trials.process import Command, Process, containment
from flatout.doctor.trials.scratch import scratch, temporary_of

# A program that no part of Flatout sees, as native code is.
UNSEEN = "[sys.executable, '-I', '-S', '-c', code]"


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MASTER_ADDR", raising=False)


@pytest.fixture(scope="module")
def _apart():
    if containment([])[1]:
        pytest.skip("the kernel, or what contains this process, allows no namespaces")


@contextmanager
def started(code, *arguments, variables=None, **options):
    with scratch() as folder:
        job = Command([sys.executable, "-c", textwrap.dedent(code), *arguments], variables or {})
        process = Process(job, folder / "a", temporary_of(folder) / "a", **options)
        try:
            yield process
        finally:
            process.end()


def said_by(code, *arguments, **options):
    with started(code, *arguments, **options) as process:
        assert process.wait() == 0, process.output()
        return json.loads(process.output())


def supervisor_of(process):
    above = psutil.Process(process.pid).parents()
    supervisors = [one for one in above if "flatout.doctor.trials.supervisor" in one.cmdline()]
    return supervisors[-1]  # the others are forks of it


def wait_until(is_so, seconds=60.0):
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
    return is_so()


def is_over(one):
    return not one.is_running() or one.status() == psutil.STATUS_ZOMBIE


SIGNALS = """
import json, os, signal, subprocess, sys
victim, refused = int(sys.argv[1]), []
for reach in (os.kill, os.killpg):
    try:
        reach(victim, signal.SIGKILL)
    except OSError as error:
        refused.append(type(error).__name__)
shell = subprocess.run(["sh", "-c", f"kill -9 {victim}"], stderr=subprocess.DEVNULL)
own = subprocess.Popen(["sleep", "60"])
own.kill()
print(json.dumps([refused, shell.returncode != 0, own.wait()]))
"""


@contextmanager
def another_of_the_users():
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as one:
        try:
            yield one
        finally:
            one.kill()


@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize("redirected", [None, True])
def test_no_other_process_of_the_user_can_be_signaled(redirected):
    with another_of_the_users() as victim:
        said = said_by(SIGNALS, str(victim.pid), is_redirected=redirected)
        assert victim.poll() is None
    assert said == [["ProcessLookupError", "ProcessLookupError"], True, -signal.SIGKILL]


@pytest.mark.skipif(landlock.version() < 6, reason="the kernel's Landlock does not hold signals")
def test_without_a_namespace_landlock_holds_signals():
    with another_of_the_users() as victim:
        said = said_by(SIGNALS, str(victim.pid), apart=0)
        assert victim.poll() is None
    assert said == [["PermissionError", "PermissionError"], True, -signal.SIGKILL]


LEAVES = """
import os, subprocess, sys, time
# A daemon: its parent ends at once, and it leads its own session.
os.system("(setsid sleep 600 </dev/null >/dev/null 2>&1 &)")
child = subprocess.Popen(["sh", "-c", "setsid sleep 601 & wait"])
with open(sys.argv[1] + "/began", "w"):
    pass
time.sleep(600)
"""


@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize("redirected", [None, True])
def test_no_child_outlives_a_killed_supervisor(tmp_path, redirected):
    with started(LEAVES, str(tmp_path), passes=[tmp_path], is_redirected=redirected) as process:
        supervisor = supervisor_of(process)

        def left():
            return [one for one in supervisor.children(recursive=True) if one.name() == "sleep"]

        assert wait_until(lambda: (tmp_path / "began").exists() and len(left()) == 2)
        below = supervisor.children(recursive=True)
        supervisor.kill()
        assert wait_until(lambda: all(map(is_over, below)))


@pytest.mark.usefixtures("_apart")
def test_the_first_process_inside_outlives_what_the_script_sends_it():
    code = """
    import os, signal
    assert os.getppid() == 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGSTOP):
        os.kill(1, number)
    os.kill(os.getpid(), signal.SIGUSR1)
    """
    with started(code) as process:
        assert process.wait() == -signal.SIGUSR1


@pytest.mark.usefixtures("_apart")
def test_a_script_whose_first_process_is_killed_from_outside_has_ended():
    with started("import time; time.sleep(600)") as process:
        script = psutil.Process(process.pid)
        script.parent().kill()
        assert process.wait() == -signal.SIGKILL
        assert is_over(script)


@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize("apart", [0, PROCESSES, NETWORK, PROCESSES | NETWORK])
def test_a_script_hears_an_interrupt_and_is_stopped_with_what_it_has_begun(tmp_path, apart):
    code = """
    import subprocess, sys, time
    child = subprocess.Popen(["sleep", "600"])
    try:
        open(sys.argv[1] + "/began", "w").close()
        time.sleep(600)
    except KeyboardInterrupt:
        assert child.poll() is None
        sys.exit(7)
    """
    with started(code, str(tmp_path), passes=[tmp_path], apart=apart) as process:
        assert wait_until((tmp_path / "began").exists)
        script = psutil.Process(process.pid)
        process.stop()
        both = [script, *script.children()]
        assert len(both) == 2
        assert wait_until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in both))
        process.go()
        process.interrupt()
        assert process.wait() == 7


REACHES = f"""
import errno, json, os, subprocess, sys
code = '''
import errno, os, socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    try:
        one.connect(("198.51.100.1", 9))  # nothing is sent by that
        print("a way out")
    except OSError as error:
        print(errno.errorcode[error.errno])
print(os.readlink("/proc/self/ns/net"))
'''
print(json.dumps(subprocess.run({UNSEEN}, capture_output=True, text=True).stdout.split("\\n")))
"""


@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize(
    ("redirected", "apart"),
    [(None, PROCESSES | NETWORK), (None, NETWORK), (True, PROCESSES | NETWORK), (True, NETWORK)],
)
def test_nothing_leads_out_of_the_network_of_native_code(redirected, apart):
    reached, network, _ = said_by(REACHES, is_redirected=redirected, apart=apart)
    assert reached == "ENETUNREACH"
    assert network != os.readlink("/proc/self/ns/net")


MEETS = """
import json, os, socket
with socket.create_server(("", 0)) as server:
    socket.create_connection((socket.gethostname(), server.getsockname()[1])).close()
print(json.dumps(os.environ["GLOO_SOCKET_IFNAME"]))
"""
UNNAMED = """
import socket, sys
from pathlib import Path
from flatout.doctor.trials import namespaces
# As where only a name server knows what this machine is called.
namespaces.leave(namespaces.MOUNTS)
hosts = Path(sys.argv[1], "hosts")
hosts.write_text("127.0.0.1 localhost\\n")
namespaces.mount(str(hosts), "/etc/hosts", "", namespaces.BIND)
sys.path.insert(0, sys.argv[2])
from test_doctor_contained import MEETS, said_by
print(said_by(MEETS, variables={"GLOO_SOCKET_IFNAME": "eth0"}))
"""


@pytest.mark.usefixtures("_apart")
def test_ranks_meet_by_a_name_that_only_a_name_server_knew(tmp_path):
    code = [sys.executable, "-c", UNNAMED, str(tmp_path), os.path.dirname(__file__)]
    done = subprocess.run(code, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("lo\n", "")


MASKED = """
import sys
from pathlib import Path
from flatout.doctor.trials import namespaces
# As containers that hide parts of /proc, or say less memory.
namespaces.leave(namespaces.MOUNTS)
Path(sys.argv[1], "own").write_text("own")
namespaces.mount(sys.argv[1] + "/own", "/proc/version", "", namespaces.BIND)
sys.path.insert(0, sys.argv[2])
from test_doctor_contained import said_by
print(said_by("import json; print(json.dumps(open('/proc/version').read()))"))
"""


@pytest.mark.usefixtures("_apart")
def test_what_a_container_has_mounted_below_proc_stays(tmp_path):
    code = [sys.executable, "-c", MASKED, str(tmp_path), os.path.dirname(__file__)]
    done = subprocess.run(code, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("own\n", "")


@pytest.mark.usefixtures("_apart")
def test_ranks_that_meet_on_another_machine_keep_the_network():
    with started(REACHES, variables={"MASTER_ADDR": "198.51.100.1"}) as process:
        assert process.lacks == ["ranks"]
        assert process.wait() == 0
        assert os.readlink("/proc/self/ns/net") in process.output()


def test_where_ranks_meet_is_read_from_the_environment_and_torchruns_options():
    elsewhere = own_network.meets_elsewhere
    assert elsewhere(["train.py"], {}) == ""
    assert elsewhere(["train.py"], {"MASTER_ADDR": "localhost"}) == ""
    assert elsewhere(["train.py"], {"MASTER_ADDR": socket.gethostname()}) == ""
    assert elsewhere(["train.py"], {"MASTER_ADDR": "node-1.cluster"}) == "node-1.cluster"
    assert elsewhere(["-m", "x", "--rdzv-endpoint=198.51.100.1:29400"], {}) == "198.51.100.1"
    assert elsewhere(["-m", "x", "--master_addr", "2001:db8::1"], {}) == "2001:db8::1"
    assert elsewhere(["-m", "x", "--rdzv_endpoint", "[2001:db8::1]:2"], {}) == "2001:db8::1"
    assert elsewhere(["-m", "x", "--rdzv-endpoint", "127.0.0.1:0"], {}) == ""


@contextmanager
def service(family, address):
    """Says of what it got, once all is there, how much that was."""
    with socket.create_server((address, 0), family=family) as listener:

        def serve():
            while True:
                try:
                    one, _ = listener.accept()
                except OSError:
                    return
                with one:
                    got = 0
                    while read := one.recv(1 << 16):
                        got += len(read)
                    one.sendall(b"%d" % got)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


ASKS = f"""
import json, subprocess, sys
code = '''
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as one:
    one.sendall(bytes(3_000_000))
    one.shutdown(socket.SHUT_WR)
    print(one.recv(100).decode())
'''
asked = [*{UNSEEN}, *sys.argv[1:]]
unseen = subprocess.run(asked, stdout=subprocess.PIPE, text=True)
sys.stdout.write("[" + unseen.stdout + ", ")
exec(code)
print("]")
"""


@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_service_of_this_machine_is_reached(family, address):
    try:
        reached = service(family, address)
        with reached as port:
            assert said_by(ASKS, address, str(port)) == [3_000_000, 3_000_000]
    except OSError as error:
        pytest.skip(f"no {address} here: {error}")


@pytest.mark.usefixtures("_apart")
def test_what_nothing_contains_is_told():
    signals = [] if landlock.version() >= 6 else ["signals"]
    for apart, lacks in (
        (0, [*signals, "orphans", "network"]),
        (PROCESSES, ["network"]),
        (NETWORK, [*signals, "orphans"]),
        (PROCESSES | NETWORK, []),
    ):
        with started("pass", apart=apart) as process:
            assert process.lacks == lacks
            assert process.wait() == 0


def test_a_command_that_cannot_be_started_is_named():
    with scratch() as folder, pytest.raises(Exception, match="no_such_command: No such file"):
        Process(Command(["no_such_command"]), folder / "a", temporary_of(folder) / "a")


def test_a_trial_is_met_however_long_its_folders_name_is(tmp_path):
    folder = tmp_path / ("long" * 30) / ("longer" * 20)
    folder.mkdir(parents=True)
    code = "from flatout.doctor.trials.step_sync import at_step; at_step()"
    with step_sync.listen(str(folder)) as listener:
        variables = {**os.environ, step_sync.VARIABLE: str(folder)}
        with subprocess.Popen([sys.executable, "-c", code], env=variables) as script:
            listener.settimeout(60)
            connection, _ = listener.accept()
            with connection, connection.makefile() as lines:
                assert json.loads(lines.readline())["pid"] == script.pid
        assert script.returncode == 0
