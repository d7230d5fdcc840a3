import os
import re
import subprocess
import sys
import threading

from flatout.save.unfinished import is_abandoned, is_unfinished, new_name


def test_names_are_unique_across_threads() -> None:
    names: list[str] = []
    threads = [
        threading.Thread(target=lambda: names.extend(new_name() for _ in range(500)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 2000
    assert all(map(is_unfinished, names))


def test_a_writer_is_alive_until_it_ends_even_if_nobody_has_asked_for_its_exit_status() -> None:
    program = "from flatout.save.unfinished import new_name; print(new_name(), flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert is_unfinished(name)
    assert not is_abandoned(name)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # now it is a zombie
    assert is_abandoned(name)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert is_abandoned(name)


def test_another_process_with_the_same_number_is_not_the_writer() -> None:
    name = new_name()
    earlier = re.sub(r"-(\d+)-(\d+)-(\d+)$", r"-\1-1-\3", name)
    assert not is_abandoned(name)
    assert is_abandoned(earlier)


def test_other_names_are_never_ours() -> None:
    for name in ["", ".tmp-", ".tmp-host-1-2", "tmp-host-1-2-3", ".tmp-host-1-2-3.txt", "step-1"]:
        assert not is_unfinished(name)
        assert not is_abandoned(name)
