import json
import os
import subprocess
import sys

DEVICES = "import flatout.cli.main as m, sys; sys.argv[0] = 'flatout'; m.main()"


def devices(*options: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", DEVICES, "devices", *options],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    assert done.stderr == ""
    return done.stdout


def test_json_is_one_object_with_this_machine_in_it() -> None:
    found = json.loads(devices("--json"))
    assert found["cpus"]["present"] == os.cpu_count()
    assert found["cpus"]["allowed"] == len(os.sched_getaffinity(0))
    assert found["torch"]["version"]
    assert isinstance(found["gpus"], list)


def test_the_table_has_a_row_for_each_thing_even_in_a_narrow_terminal() -> None:
    for columns in ("200", "30"):
        names = [
            line.split()[0] for line in devices(COLUMNS=columns).splitlines() if line[:1].strip()
        ]
        assert names[:2] == ["CPU", "RAM"]
        assert "GPU" in names
        assert names[-1] == "torch"


def test_hidden_gpus_have_no_number() -> None:
    found = json.loads(devices("--json", CUDA_VISIBLE_DEVICES=""))
    assert all(gpu["cuda_index"] is None for gpu in found["gpus"])
