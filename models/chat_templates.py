"""Chat templates, which are programs of strangers: :mod:`models.limited` runs this file in a process of its own."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return what a chat template makes of values, in Jinja's sandbox and with the functions that transformers adds.

    Example:
        >>> from models import chat_templates
        >>> chat_templates.render("{{ 'Hello' | tojson }}", {})
        '"Hello"'
    """
    return _compiled(template).render(**values)


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} marks what an assistant wrote, for training; here its content is just text."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Write a value as JSON; Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
