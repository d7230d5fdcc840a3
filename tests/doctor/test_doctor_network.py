"""What a script would send elsewhere is found in its code."""

import textwrap

import pytest

from flatout.doctor.trials.network import find_sends


def sends(tmp_path, code):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(code).lstrip())
    return [(one.line, one.what) for one in find_sends(script)]


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import wandb\nwandb.init(project='x')", "logs to Weights & Biases"),
        ("from wandb import init as begin\nbegin()", "logs to Weights & Biases"),
        ("import boto3 as b\nb.client('s3')", "uses AWS"),
        ("import requests\nrequests.post('http://x', data=1)", "sends an HTTP request"),
        ("from urllib.request import urlopen\nurlopen('http://x')", "sends an HTTP request"),
        ("import subprocess\nsubprocess.run(['/usr/bin/aws', 's3', 'cp'])", "runs aws"),
        ("import os\nos.system(f'scp model.pt {host}:')", "runs scp"),
        ("model = make()\nmodel.push_to_hub('x')", "uploads to the Hugging Face hub"),
        ("a = 1\nTrainingArguments(push_to_hub=True)", "uploads to the Hugging Face hub"),
        ("import smtplib\nsmtplib.SMTP('mail')", "sends mail"),
        ("a = 1\nsave('s3://bucket/x')", "names a place beyond this machine, s3://bucket/x"),
    ],
)
def test_what_sends_is_found_with_its_line(tmp_path, code, what):
    assert sends(tmp_path, code) == [(2, what)]


def test_what_sends_nothing_is_not_named(tmp_path):
    code = """
    import os, subprocess, torch
    from torch.utils.tensorboard import SummaryWriter

    subprocess.run(["nvidia-smi"])
    os.system("ls")
    torch.save({}, "model.pt")
    SummaryWriter("runs")
    requests = []
    requests.append(1)
    TrainingArguments(push_to_hub=False)
    """
    assert sends(tmp_path, code) == []


def test_modules_beside_the_script_are_read_too(tmp_path):
    (tmp_path / "tools" / "deep").mkdir(parents=True)
    (tmp_path / "tools" / "__init__.py").write_text("from .deep import store\n")
    (tmp_path / "tools" / "deep" / "__init__.py").write_text("")
    store = tmp_path / "tools" / "deep" / "store.py"
    store.write_text(
        "import train\n\n\ndef put():\n    import paramiko\n    paramiko.SSHClient()\n"
    )
    (tmp_path / "unused.py").write_text("import requests\nrequests.get('http://x')\n")
    script = tmp_path / "train.py"
    script.write_text("import tools\n")
    assert [str(one) for one in find_sends(script)] == [f"connects by SSH ({store}:6)"]


def test_a_script_that_cannot_be_parsed_sends_nothing(tmp_path):
    assert sends(tmp_path, "def (") == []
    assert find_sends(tmp_path / "absent.py") == []
