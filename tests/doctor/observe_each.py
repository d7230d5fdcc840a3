"""Observes scripts, each in a fork of this process, which has imported torch once; two at a time.

Reads JSON from stdin: folder and command of each.
"""

import json
import os
import sys

import torch
import torch._dynamo  # takes most of the time of a first optimizer
from sklearn import datasets  # noqa: F401

from flatout.observe.start import main

AT_ONCE = 2
assert torch.__version__
running = 0
for folder, command in json.load(sys.stdin):
    if running == AT_ONCE:
        os.wait()
        running -= 1
    child = os.fork()
    if not child:
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(null, 1)
        os.dup2(log, 2)
        status = 1
        try:
            status = main(["seen", "--steps", "24", *command])
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    running += 1
for _ in range(running):
    os.wait()
