"""Policy names as kvjax before 0.3.0 wrote them, in files and results, which mean other policies now.

Until then a name had an even allocation where it named none, ``h2o`` protected nothing, the larger of two protections
counted, and ``laprox`` was another reading of its paper. Since then a paper's name stands for its published method.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Mapping
from typing import Any

RENAMED = (0, 3, 0)  # the first version whose names are today's
TODAY = {"names": ".".join(map(str, RENAMED))}  # what a file says whose names are today's, whatever versions made it
INHERITED = {
    "kvzip": "model(normalise=False)",
    "kvgrad": "model(normalise=False)",
    "zap": "model(normalise=False)",
    "laprox": "model",
    "cake": "cake",
    "lava": "lava",
}
GATE = "zap+protect(sinks=4,recent=0.02)"
BUDGET = 256  # tokens, by which it is decided whether a count or a share was the larger one
FIELDS = ("policy", "policies", "over", "against", "select")
SENTENCES = ("claim", "name", "experiment")  # which name policies among other words


def is_former(version: Any) -> bool:
    """Return whether a version of kvjax, as its files name it, wrote former names; True for a text that is no version.

    Example:
        >>> [is_former(x) for x in ("0.2.0", "0.3.0", "not installed", None)]
        [True, False, True, False]
    """
    if version is None:
        return False
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return found is None or tuple(map(int, found.groups())) < RENAMED


@functools.cache
def renamed(name: str) -> str:
    """Return today's name of the policy that a former name stood for; another text as it is.

    Where a count met a share of the budget, of which the larger one counted, that of 256 slots is taken.

    Example:
        >>> renamed("kvzip"), renamed("kvzip+caote@model(normalise=False)")
        ('kvzip@uniform', 'kvzip+caote')
        >>> renamed("h2o"), renamed("h2o+caote+protect(recent=0.5)")
        ('h2o+protect(recent=0)', 'h2o+caote')
        >>> renamed("laprox(kernel=5)@model")
        "laprox(kernel=5,gqa='group',pooled='product')"
        >>> renamed("zap+protect(sinks=4,recent=0.02)@model(normalise=False)")
        'gate'
    """
    links, allocation = _cut(without_tuned(name, warn=False))
    base = links[0].partition("(")[0]
    if not re.fullmatch(r"[a-z]\w*", base):
        return name
    links = _protecting(links, base)
    if base == "laprox":
        links[0] = _former_laprox(links[0])
    allocation, chain = allocation or "uniform", "+".join(links)
    chain = "gate" if chain == GATE else chain
    if allocation != INHERITED.get(base, "uniform"):
        return f"{chain}@{allocation}"
    return chain


def renamed_document(content: Any, version: Any = None) -> Any:
    """Return JSON's content with today's names of policies, if a kvjax that wrote former ones made it.

    The version is the given one, or that of :func:`version_of`.

    Example:
        >>> made = {"versions": {"kvjax": "0.2.0"}, "policies": ["tova", "kvzip"]}
        >>> renamed_document(made)["policies"]
        ['tova', 'kvzip@uniform']
    """
    version = version_of(content) if version is None else version
    return _walked(content) if is_former(version) else content


def former_structure(name: str) -> str:
    """Return a name that today stands for a chain of the links, and an allocation, that a former name stood for.

    Its policy may protect other tokens.

    Example:
        >>> former_structure("kvzip+protect(recent=0.5)")
        'kvzip+protect(recent=0.5)@uniform'
    """
    links, allocation = _cut(name)
    return f"{'+'.join(links)}@{allocation or 'uniform'}"


def without_tuned(name: str, warn: bool = True) -> str:
    """Return a short name with ``snapkv(kernel=13)`` in place of ``snapkv_tuned``, which it was called before 0.3.0."""
    if "snapkv_tuned" not in name:
        return name
    if warn:
        _warn()
    with_arguments = re.sub(r"\bsnapkv_tuned\s*\(\s*(?=\w)", "snapkv(kernel=13,", name)
    return re.sub(r"\bsnapkv_tuned\b(\s*\(\s*\))?", "snapkv(kernel=13)", with_arguments)


@functools.cache
def _warn() -> None:
    warnings.warn(
        "the policy 'snapkv_tuned' is now written snapkv(kernel=13).", DeprecationWarning, stacklevel=4
    )  # once in a process


def version_of(content: Any) -> Any:
    """Return the version of kvjax whose names JSON's content has: that of its ``names``, else a former one of those
    that made it, else the first; None where it names none.
    """
    if not isinstance(content, Mapping):
        return None
    if isinstance(content.get("names"), str):
        return content["names"]
    made = [content, *content.get("environments", [])]
    versions = [one["versions"].get("kvjax") for one in made if isinstance(one.get("versions"), Mapping)]
    return next((version for version in versions if is_former(version)), versions[0] if versions else None)


def _walked(content: Any, field: str = "") -> Any:
    if isinstance(content, dict):
        return {_renamed_key(key, field): _walked(value, key) for key, value in content.items()}
    if isinstance(content, list):
        return [_walked(value, field) for value in content]
    if isinstance(content, str) and field in FIELDS:
        return ",".join(renamed(name) for name in re.split(r",(?![^(]*\))", content))
    if isinstance(content, str) and field in SENTENCES:
        return re.sub(r"(?<![\w(])[a-z]\w*[^\s]*?(?=,?(\s|$))", lambda found: renamed(found[0]), content)
    return content


def _renamed_key(key: str, field: str) -> str:
    return renamed(key) if field in ("answers", "kept") else key


def _cut(name: str) -> tuple[list[str], str]:
    """Cut a name into the texts of its links and of its allocation, "" for none."""
    name = re.sub(r"\s*([+@])\s*(?=[a-z(])", r"\1", name.strip())
    chain, _, allocation = name.rpartition("@") if "@" in re.sub(r"\(.*?\)", "", name) else (name, "", "")
    chain = re.sub(r"^\((.*)\)$", r"\1", chain)
    return re.split(r"\+(?![^(]*\))", chain), allocation


def _protecting(links: list[str], base: str) -> list[str]:
    """Return links that protect, by today's rule, what those protected by the larger one."""
    given = [_arguments(link) for link in links if link.partition("(")[0] == "protect"]
    if not given and base != "h2o":
        return links
    own = _arguments(links[0])
    before = {"sinks": own.get("sinks", _SINKS.get(base, 0)), "recent": own.get("window", _RECENT.get(base, 0))}
    before |= {"recent": own.get("lag", 128)} if base == "lagkv" else {}
    now = before | ({"recent": 0.5} if base == "h2o" else {})
    largest = {what: max([before[what], *(one.get(what, 0) for one in given)], key=_tokens) for what in before}
    changed = [f"{what}={amount!r}" for what, amount in largest.items() if repr(amount) != repr(now[what])]
    at = next((i for i, link in enumerate(links) if link.partition("(")[0] == "protect"), len(links))
    others = [link for link in links if link.partition("(")[0] != "protect"]
    return others[:at] + ([f"protect({','.join(changed)})"] if changed else []) + others[at:]


# What base scores protected, as they still do: first tokens, and last ones.
_SINKS = {"streaming": 4, "sage": 0.25, "expected_attention": 4, "kvzip": 4, "kvgrad": 4, "curdkv": 4, "lagkv": 4}
_RECENT = dict.fromkeys(("snapkv", "dropkv", "dapq", "finch", "laprox", "cake", "lava"), 32) | {"rkv": 8, "sage": 0.25}


def _former_laprox(link: str) -> str:
    """Return today's name of a link that had other defaults."""
    given = _arguments(link)
    readings = {name: given.pop(name, former) for name, former in (("gqa", "group"), ("pooled", "product"))}
    if given.get("target") != "attention":  # of which all readings are one
        given |= {name: kind for name, kind in readings.items() if kind not in ("joint", "attention")}
    return f"laprox({','.join(f'{name}={value!r}' for name, value in given.items())})" if given else "laprox"


def _tokens(amount: int | float) -> float:
    return amount if isinstance(amount, int) else amount * BUDGET


def _arguments(link: str) -> dict[str, Any]:
    """Return the arguments of a link that is written as a call; none of one that is no such text."""
    try:
        call = ast.parse(link, mode="eval").body
        return {str(one.arg): ast.literal_eval(one.value) for one in getattr(call, "keywords", [])}
    except (SyntaxError, ValueError):
        return {}
