"""A SLURM cluster of two nodes on this machine, whose daemons are this process' children."""

import os
import secrets
import shutil
import socket
import subprocess
import time

from world_ranks import free_port

NEEDED = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "munged")

CONFIG = """\
ClusterName=flatout
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=10
UnkillableStepTimeout=600
SchedulerParameters=batch_sched_delay=1,sched_interval=2,sched_min_interval=0,requeue_delay=1
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """What is not installed of what a cluster needs."""
    return [name for name in NEEDED if shutil.which(name) is None]


class Cluster:
    def __init__(self, folder, more=""):
        """Start it; `more` is added to the lines of its configuration."""
        self.folder = folder
        (folder / "state").mkdir()
        self.config = folder / "slurm.conf"
        self.config.write_text(
            CONFIG.format(
                host=socket.gethostname(),
                folder=folder,
                port=free_port(),
                one=free_port(),
                two=free_port(),
                # Ranks meet at a port that the job's number gives: no other cluster here has it.
                first_job=1 + secrets.randbelow(60_000_000),
            )
            + more
        )
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        # rank 0 listens on the only host there is, whatever the nodes are called
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self.config),
            "MASTER_ADDR": "127.0.0.1",
            "FLATOUT_CACHE": str(folder / "cache"),
        }
        self.daemons = []
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self):
        of = self.folder
        self._daemon(
            *("munged", "--foreground", "--force", f"--key-file={of}/munge.key"),
            *(f"--socket={of}/munge.socket", f"--pid-file={of}/munged.pid"),
            *(f"--log-file={of}/munged.log", f"--seed-file={of}/munged.seed"),
        )
        self._until(lambda: (of / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-f", self.config)
        for name in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", name, "-f", self.config)
        self._until(self._idle)

    def _daemon(self, *command):
        with open(self.folder / f"{command[0]}.out", "a") as output:
            self.daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
            )

    def _until(self, happened, seconds=60):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if happened():
                return
            time.sleep(0.1)
        logs = [path.read_text()[-1000:] for path in self.folder.glob("*.log")]
        raise AssertionError("\n".join(["the cluster is not idle", self.ask("sinfo", "-R"), *logs]))

    def ask(self, *command):
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        ).stdout

    def run(self, *command, cwd):
        return subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=120,
            check=False,
        )

    def clear(self):
        """End what a test left, which would keep the next one waiting; print what there was."""
        print(self.ask("squeue", "--all", "-o", "%i %T %r %N"))
        print(self.ask("sinfo", "-N", "-o", "%N %T %E"))
        self.ask("scancel", "--full", "--user=root")
        # A node whose job did not start or end well is out until it is taken back.
        self.ask("scontrol", "update", "NodeName=n[1-2]", "State=RESUME")
        self._until(lambda: not self.ask("squeue", "-h") and self._idle())

    def _idle(self):
        return self.ask("sinfo", "-h", "-p", "all", "-o", "%t %D").strip() == "idle 2"

    def stop(self):
        self.ask("scancel", "--full", "--user=root")
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
