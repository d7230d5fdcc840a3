"""The templates of pages. Inserted text is escaped, and pages load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from flatout.doctor import docs_page
from flatout.words import counted, rounded

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from markupsafe import Markup


def template(name: str) -> Template:
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("flatout", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(ms=rounded, plain=plain, counted=counted, percent=_percent)
    environment.filters.update(docs=_docs, breakable=_breakable)
    return environment


def plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    if isinstance(value, float):
        return rounded(value, 4)
    return "unknown" if value is None else str(value)


def _breakable(words: str) -> Markup:
    from markupsafe import Markup, escape

    result = escape(words.replace("->", "→"))
    for joint in "=_":
        result = result.replace(joint, joint + Markup("<wbr>"))
    return result


def _docs(name: str) -> str:
    # As plain words: the page has no links, since its content comes from the script.
    return docs_page(name).removeprefix("https://")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"
