"""Two hosts on this machine, each with its own sshd and network."""

import os
import shutil
import subprocess
import time

from two_hosts import ADDRESSES, Hosts, cannot_be_made

SSHD = """\
ListenAddress {address}
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
"""
CONFIG = """\
Host host1
  HostName {0}
Host host2
  HostName {1}
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def missing():
    """Why there can be none; "" where there can."""
    needed = {"ssh": "openssh-client", "ssh-keygen": "openssh-client", "/usr/sbin/sshd":
              "openssh-server", "flock": "util-linux"}  # fmt: skip
    for program, package in needed.items():
        if shutil.which(program) is None:
            return f"{package} is not installed"
    return cannot_be_made()


class SshHosts:
    """Use as a context; `config` is for `ssh -F`, and `ssh` a program that has it.

    `before` stands before what runs on host1.
    """

    def __init__(self, folder):
        self.folder = folder
        self.config = folder / "ssh_config"
        self.ssh = folder / "ssh"
        self.hosts = Hosts()
        self.before = self.hosts.before[0]
        self.daemons = []

    def __enter__(self):
        self.hosts.__enter__()
        try:
            for name in ("host_key", "key"):
                command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name]
                subprocess.run(command, cwd=self.folder, check=True)
            self.ssh.write_text(f'#!/bin/sh\nexec ssh -F {self.config} "$@"\n')
            self.ssh.chmod(0o755)
            self.config.write_text(CONFIG.format(*ADDRESSES, folder=self.folder))
            os.makedirs("/run/sshd", exist_ok=True)
            for number, address in enumerate(ADDRESSES):
                own = self.folder / f"sshd{number}"
                own.write_text(SSHD.format(address=address, folder=self.folder))
                command = [*self.hosts.before[number], "/usr/sbin/sshd", "-D", "-e", "-f", str(own)]
                with open(f"{own}.log", "w") as log:
                    self.daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
            for host in ("host1", "host2"):
                self._wait_for(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_for(self, host):
        until = time.monotonic() + 100
        while True:
            done = subprocess.run(
                [*self.before, "ssh", "-F", str(self.config), host, "true"],
                capture_output=True,
                check=False,
            )
            if done.returncode == 0:
                return
            assert time.monotonic() < until, done.stderr
            time.sleep(0.2)

    def __exit__(self, *error):
        for one in self.daemons:
            one.terminate()
            one.wait()
        self.hosts.__exit__()
