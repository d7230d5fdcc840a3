"""Masks for secrets in the words of a command, used before the words are written anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"
_WORDS = (
    r"pass(?:word|wd|phrase|code)?|pwd|secrets?|tokens?|credentials?|auth(?:orization)?|bearer|pat|"
    r"signature|sig"
)
# The last word of a name shows a secret: --hf-token, but not --token-length. Words such as
# "password" show one anywhere in a name.
_NAME = rf"(?:(?:^|.*[^a-z]){_WORDS}|(?:^|.*[^a-z])key|.*apikey|.*(?:password|passwd|secret).*)"
_SECRET_NAME = re.compile(_NAME.replace(_WORDS, f"(?:{_WORDS})"))
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_USER = re.compile(r"(\w[\w+.-]*://)([^/\s@:]*)(:?)([^/\s@]*)@")
_QUERY = re.compile(r"([?&;]([\w.%-]+)=)([^&;\s#]+)")
_QUOTED = re.compile(r"""((["'])([\w.-]+)\2\s*:\s*(["']))((?:(?!\4).)*)(\4)""")
_HEADER = re.compile(r"\b((?:Bearer|Basic)\s+)[\w.~+/=-]+", re.IGNORECASE)
# Tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack and AWS, and JSON Web Tokens.
_KNOWN = re.compile(
    r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|ASIA|eyJ)[\w.-]{12,}"
)


def masked(command: Iterable[str]) -> list[str]:
    """Return the words of a command, with *** in place of each value whose name shows a secret.

    Covered are `--password X`, `--api-key=X`, `db.token=X`, `https://user:X@host`, parts of URLs
    and JSON, and tokens of a known form.
    """
    words: list[str] = []
    is_value = False
    for word in map(str, command):
        name, equals, value = word.partition("=")
        if is_value and not word.startswith("--"):
            words.append(MASK)
            is_value = False
            continue
        is_value = word.startswith("-") and not equals and _is_secret(word)
        if equals and value and "://" not in name and _is_secret(name):
            words.append(f"{name}={MASK}")
        else:
            words.append(masked_text(word))
    return words


def masked_text(text: str) -> str:
    """Return a text, such as a message, with *** in place of each secret of a known form."""
    text = _USER.sub(_user, text)
    text = _QUERY.sub(lambda m: f"{m[1]}{MASK}" if _is_secret(m[2]) else m[0], text)
    text = _QUOTED.sub(lambda m: f"{m[1]}{MASK}{m[6]}" if _is_secret(m[3]) else m[0], text)
    return _KNOWN.sub(MASK, _HEADER.sub(rf"\1{MASK}", text))


def _user(match: re.Match[str]) -> str:
    scheme, user, colon, _ = match.groups()
    # In a URL of HTTP, a user without a password is often a token.
    shown = user if colon or not scheme.startswith("http") else MASK
    return f"{scheme}{shown}{colon and f':{MASK}'}@"


def _is_secret(name: str) -> bool:
    words = _HUMP.sub("_", name.strip("-+~").rpartition(" ")[2]).lower()
    return _SECRET_NAME.fullmatch(words) is not None
