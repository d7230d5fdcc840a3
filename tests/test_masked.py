"""Masks for secrets in the words of a command."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.masked import MASK, masked, masked_text

SECRETS = [
    ("train.py --password X --lr 0.1", "train.py --password *** --lr 0.1"),
    ("train.py --api-key=X", "train.py --api-key=***"),
    ("train.py --apiKey X", "train.py --apiKey ***"),
    ("train.py -password X", "train.py -password ***"),
    ("train.py --wandb_api_key X", "train.py --wandb_api_key ***"),
    ("train.py --AWS_SECRET_ACCESS_KEY=X", "train.py --AWS_SECRET_ACCESS_KEY=***"),
    ("train.py db.password=X +hub.token=X", "train.py db.password=*** +hub.token=***"),
    ("env HF_TOKEN=X python train.py", "env HF_TOKEN=*** python train.py"),
    ("train.py --data https://me:X@host/a", "train.py --data https://me:***@host/a"),
    ("train.py --data=s3://:X@host/a", "train.py --data=s3://:***@host/a"),
    ("train.py https://X@github.com/a", "train.py https://***@github.com/a"),
    ("train.py 'https://h/a?b=1&token=X&c=2'", "train.py 'https://h/a?b=1&token=***&c=2'"),
    ("train.py 'https://h/a?X-Amz-Signature=X'", "train.py 'https://h/a?X-Amz-Signature=***'"),
    ("""train.py '{"password": "X", "a": "b"}'""", """train.py '{"password": "***", "a": "b"}'"""),
    ("train.py -H 'Authorization: Bearer X'", "train.py -H 'Authorization: Bearer ***'"),
    ("train.py hf_XXXXXXXXXXXXXXXXXX", "train.py '***'"),
    ("train.py --token --verbose", "train.py --token --verbose"),
]


@pytest.mark.parametrize(("command", "expected"), SECRETS)
def test_a_secret_is_masked(command, expected):
    found = masked(shlex.split(command))
    assert found == shlex.split(expected)
    assert not any("X" in word.replace("X-Amz", "") for word in found)


@pytest.mark.parametrize(
    "command",
    [
        "train.py --token-length 128 --tokenizer gpt2 --epochs 5",
        "train.py --keys a b --monkey 3 --passes 2 --author me",
        "train.py ssh://git@host/a.git s3://bucket/day=3/a",
        "train.py --data a=b --out runs/a:b@c",
        "",
    ],
)
def test_words_that_are_no_secret_stay(command):
    assert masked(shlex.split(command)) == shlex.split(command)


def test_an_error_message_is_masked():
    found = masked_text("cannot read https://me:X@host/a: refused")
    assert found == f"cannot read https://me:{MASK}@host/a: refused"


@given(st.lists(st.text()))
def test_any_words_can_be_masked(words):
    assert len(masked(words)) == len(words)
    assert masked(masked(words)) == masked(words)
