"""What is asked for becomes a job, or is refused with what was expected."""

import json
import shutil

import pytest
from jobs import NOW, job

from flatout.errors import FlatoutError, SubmitError
from flatout.recipe import Recipe, dump
from flatout.submit import (
    JobOptions,
    artifacts_of,
    job_of,
    ranks_of,
    runs_of,
    seeds_of,
    target_of,
    write,
)
from flatout.submit.job import name_of
from flatout.submit.job_options import seconds


def test_a_name_for_each_script():
    assert name_of("train.py", NOW) == "train-2026-11-26-1201"
    assert name_of("jobs/My Train_2.py", NOW) == "my-train-2-2026-11-26-1201"
    assert name_of("package.train", NOW) == "train-2026-11-26-1201"
    assert name_of("99.py", NOW) == "job-99-2026-11-26-1201"
    assert name_of("日本.py", NOW) == "job-2026-11-26-1201"
    assert len(name_of(f"{'x' * 200}.py", NOW)) <= 63


def test_a_second_job_of_the_same_minute_gets_another_name(tmp_path):
    first = job(tmp_path)
    write(first, target_of("slurm"))
    assert job(tmp_path).name == f"{first.name}-2"


@pytest.mark.parametrize("name", ["Train", "1st", "a_b", "a-", "", "x" * 64, "a.b", "a\nb"])
def test_a_name_that_breaks_rfc_1035_is_refused(tmp_path, name):
    with pytest.raises(SubmitError, match="RFC 1035"):
        job(tmp_path, name=name or "-")


def test_times():
    assert [seconds(one) for one in ("2h", "1h30m", "90m", "1d", "45", "1:30:00", "2-0:00:10")] == [
        *(7200, 5400, 5400, 86_400, 45, 5400, 172_810)
    ]
    for bad in ("", "2x", "h", "two hours", "-1h"):
        with pytest.raises(SubmitError, match="expected a time"):
            seconds(bad)


def test_seeds(tmp_path):
    assert seeds_of("1,2,5-7") == (1, 2, 5, 6, 7)
    for bad in ("", "a", "3-1", "1-5000"):
        with pytest.raises(SubmitError, match="expected seeds"):
            seeds_of(bad)
    with pytest.raises(SubmitError, match="no argument says which"):
        job(tmp_path, "--seed", "1", seeds=(1, 2))
    with pytest.raises(SubmitError, match="the same checkpoints"):
        job(tmp_path, "--seed", "{seed}", seeds=(1, 2), checkpoint="/shared/run")


def test_where_no_job_runs_for_several_seeds_there_is_one_for_each(tmp_path):
    made = job(tmp_path, "--seed={seed}", seeds=(1, 7), checkpoint="/shared/{seed}", name="a")
    assert runs_of(made, target_of("slurm")) == [made]
    for name in ("kubernetes", "sagemaker", "ray"):
        found = runs_of(made, target_of(name))
        assert [(one.name, one.arguments, one.checkpoint, one.seeds) for one in found] == [
            ("a-1", ("--seed=1",), "/shared/1", ()),
            ("a-7", ("--seed=7",), "/shared/7", ()),
        ]
        assert [one.folder for one in found] == [made.folder / f"seed-{n}" for n in (1, 7)]


def test_the_nodes_measure_how_many_ranks_are_fastest(tmp_path):
    hosts = ("hosts=a",)
    for name, changes in (
        *(("slurm", {}), ("ssh", {"options": hosts}), ("mpi", {"options": hosts})),
        ("ray", {}),
    ):
        made = job(tmp_path, devices=None, **{"threads": 8, **changes})
        texts = "".join(one.text for one in target_of(name).artifacts(made))
        given = texts.replace("'", "").replace(",", "").replace("\n", " ")
        assert "--devices auto" in " ".join(given.replace(" - ", " ").split()), name
    made = job(tmp_path, devices=None, threads=None)
    text = target_of("slurm").artifacts(made)[0].text
    assert "#SBATCH --exclusive " in text
    assert 'srun --cpus-per-task="$SLURM_CPUS_ON_NODE"' in text
    assert "cpus-per-task=" not in text.split("here=")[0]
    with pytest.raises(SubmitError, match="say how many with --threads N"):
        target_of("ray").artifacts(made)
    with pytest.raises(SubmitError, match="or auto; found 'all'"):
        ranks_of("all")
    with pytest.raises(SubmitError, match="a script that trains"):
        job(tmp_path, "data", "convert", script="flatout", devices=None)


def test_servers_that_compute_nothing_are_started_by_flatout_run(tmp_path):
    hosts = ("hosts=a,b,c,d",)
    strategy = ("world.strategy=parameter_server",)
    asked = {"nodes": 4, "devices": 2, "servers": 2, "settings": strategy}
    for name, options in (
        ("slurm", ()),
        ("ssh", hosts),
        ("mpi", hosts),
        ("ray", ("storage=/shared",)),
        ("kubernetes", ("image=a", "code=/code")),
    ):
        made = job(tmp_path, **asked, options=options)
        texts = "".join(one.text for one in target_of(name).artifacts(made))
        given = texts.replace("'", "").replace(",", "").replace("\n", " ").replace(" - ", " ")
        assert "--servers 2" in " ".join(given.split()), name
    assert made.size_words == "2 nodes of 2 ranks, 2 servers on nodes of their own"
    assert made.ranks == 4
    one = job(tmp_path, devices=3, servers=1, threads=2, settings=strategy)
    assert one.size_words == "1 node of 3 ranks, 1 server beside them"
    assert "--cpus-per-task=7\n" in target_of("slurm").artifacts(one)[0].text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"script": "no.py"}, "no such script"),
        ({"script": "../outside.py"}, "not in the folder of the code"),
        ({"script": "nowhere.at.all", "is_module": True}, "no module"),
        ({"environment": ("AWS_SECRET_ACCESS_KEY=x",)}, "for all to read"),
        ({"environment": ("PET_NNODES=2",)}, "by the cluster alone"),
        ({"environment": ("no",)}, "expected NAME=VALUE"),
        ({"time": "60"}, "before the time limit"),
        ({"devices": 0}, "expected 1 or more"),
        ({"devices": 2, "servers": 3}, "more servers than ranks"),
        ({"nodes": 2, "servers": 2}, "one at least must compute"),
        ({"nodes": 2, "servers": 1}, "leaves one rank"),
        ({"devices": None, "servers": 1}, "not with --devices auto"),
        (
            {"devices": 2, "servers": 1, "settings": ("world.strategy=ddp",)},
            r"--servers 1 expects world\.strategy=parameter_server; found --set",
        ),
        ({"devices": 2, "servers": 1, "settings": ("world.servers=2",)}, "say unlike numbers"),
        ({"settings": ("world.strategie=ddp",)}, "strategie"),
        ({"options": ("a=1", "a=2")}, "twice"),
        ({"price": 0.68}, "not in which currency"),
        ({"currency": "USD"}, "but no price"),
        ({"price": 0.0, "currency": "USD"}, "a price above 0"),
        ({"price": float("nan"), "currency": "USD"}, "a price above 0"),
        ({"price": 0.68, "currency": "dollars"}, "three capital letters"),
    ],
)
def test_what_is_refused(tmp_path, asked, said):
    root = tmp_path / "root"
    root.mkdir()
    (root / "train.py").write_text("")
    (tmp_path / "outside.py").write_text("")
    with pytest.raises(FlatoutError, match=said):
        job_of(JobOptions(**{"script": "train.py", **asked}), root, NOW)


def test_servers_are_taken_where_any_place_names_their_strategy(tmp_path):
    strategy = "parameter_server"
    dump(Recipe(world={"strategy": strategy}), tmp_path / "flatout.toml")
    asked = {"devices": 2, "servers": 1}
    for name, arguments, text, more in (
        ("by_set.py", (), "", {"settings": (f"world.strategy={strategy}",)}),
        ("by_argument.py", (f"--strategy={strategy}",), "", {}),
        ("by_recipe.py", (), "", {"recipe": str(tmp_path / "flatout.toml")}),
        ("by_code.py", (), f"strategy = {strategy!r}", {}),
    ):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        assert job(folder, *arguments, script=name, text=text, **asked, **more).servers == 1


def test_a_script_that_would_not_travel_is_refused(tmp_path):
    (tmp_path / ".gitignore").write_text("train.py\n")
    with pytest.raises(SubmitError, match="not among the code"):
        job(tmp_path)


def test_the_recipe_decides_threads_and_travels(tmp_path):
    recipe = Recipe().replace({"process.threads": 3, "compute.precision": "bf16"})
    dump(recipe, tmp_path / "flatout.toml")
    (tmp_path / "train.py").write_text("")
    asked = JobOptions("train.py", recipe=str(tmp_path / "flatout.toml"), devices=2, gpus=0)
    made = job_of(asked, tmp_path, NOW)
    assert made.threads == 3
    assert made.command == ["flatout", "run", "--recipe", "../recipe.toml", "train.py"]
    script = target_of("slurm").artifacts(made)[0].text
    assert "#SBATCH --cpus-per-task=6\n" in script
    texts = {one.name: one.text for one in artifacts_of(made, target_of("slurm"))}
    assert 'precision = "bf16"' in texts["recipe.toml"]
    assert json.loads(texts["job.json"])["command"] == made.command


def test_a_command_of_flatout_is_a_job(tmp_path):
    made = job(tmp_path, "data", "convert", "day.svm", "day.rows", script="flatout")
    assert made.command == ["flatout", "data", "convert", "day.svm", "day.rows"]
    assert made.code.files == ()
    assert made.name == "data-2026-11-26-1201"
    text = target_of("slurm").artifacts(made)[0].text
    assert f"\ncd -- {tmp_path} || exit 1\n" in text
    # It goes on where it was: that it was stopped is no reason to give up.
    assert "137 | 138 | 143)" in text


def test_a_job_at_its_limit_goes_on_only_from_a_checkpoint(tmp_path):
    def text(**asked):
        return target_of("slurm").artifacts(job(tmp_path, **asked))[0].text

    assert "138" not in text(time="2h")
    assert "find /shared/run -newer started -print" in text(time="2h", checkpoint="/shared/run")
    assert "137 | 138 | 143)" in text(time="2h", checkpoint="s3://bucket/run")
    assert "#SBATCH --time=2:00:00\n#SBATCH --signal=USR1@120 " in text(time="2h")


def test_a_script_that_looks_like_an_option(tmp_path):
    made = job(tmp_path, "-x", script="-train.py")
    assert made.command == ["flatout", "run", "./-train.py", "-x"]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="openssh-client is not installed")
def test_nodes_meet_at_the_address_of_a_name_that_only_ssh_knows(tmp_path):
    (tmp_path / "config").write_text("Host first\n  HostName 10.1.2.3\n")
    options = (f"config={tmp_path / 'config'}", "hosts=me@first,second")
    (text, _) = target_of("ssh").artifacts(job(tmp_path, nodes=2, options=options))
    assert "--rendezvous 10.1.2.3:29500 " in text.text
