"""Provenance: how a command's JSON file was made.

Evaluations, benchmarks and training all use it: :func:`write` puts :func:`facts` in front of the figures.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

import kvjax
from models.commands import Invocation
from models.decoder import Decoder
from models.files import write_json
from models.fingerprints import fingerprints
from models.tokenizer import Tokenizer

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "jinja2")
SETTINGS = {  # of JAX, with the defaults
    "jax_default_matmul_precision": None,
    "jax_enable_x64": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
}
COMPILERS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
ROOT = Path(kvjax.__file__).parent.parent
CODE = ("kernels_pallas", "kvjax", "models", "evals", "train", "benchmarks", ":(exclude)benchmarks/results")


def write(flags: argparse.Namespace, figures: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    """Write a command's figures to ``flags.json``, after :func:`facts`."""
    made = facts(flags.invocation, getattr(flags, "seed", None), dict(digests))
    write_json(flags.json, {**made, **figures})


def facts(invocation: Invocation, seed: int | None, digests: Any) -> dict[str, Any]:
    """Return the command line, its seed, the seconds since it began, fingerprints, and :func:`environment`.

    ``digests`` are fingerprints by name, such as those of :func:`models.fingerprints.fingerprints`.
    """
    return {
        "command": invocation.command,
        "seed": seed,
        "seconds": round(time.monotonic() - invocation.time, 1),
        "fingerprints": digests,
        **environment(),
    }


def environment() -> dict[str, Any]:
    """Return the device, versions, the commit of the running code, and settings and variables that change numbers."""
    # kvjax's version is the module's: a checkout on the path is imported without being an installed distribution.
    versions = {"python": platform.python_version(), "kvjax": kvjax.__version__}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    read = {name: os.environ[name] for name in COMPILERS if os.environ.get(name)}
    return {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "versions": versions,
        "commit": commit(),
        "settings": settings() | read,
    }


def settings() -> dict[str, Any]:
    """Return the settings of JAX that change numbers, where they are not the default ones."""
    found = {name: getattr(jax.config, name, default) for name, default in SETTINGS.items()}
    return {name: value for name, value in found.items() if value != SETTINGS[name]}


def of_run(model: Decoder, tokenizer: Tokenizer, networks: Iterable[Any] = ()) -> dict[str, str]:
    """Return what a command's answers depend on beside its flags: :func:`fingerprints` and :func:`of_process`."""
    return fingerprints(model, tokenizer, networks) | of_process(tokenizer)


def of_process(tokenizer: Tokenizer) -> dict[str, str]:
    """Return what figures depend on beside files and flags: JAX's settings, and a date that the chat template writes.

    A killed run resumes only with the same.
    """
    found = {"settings": json.dumps(settings(), sort_keys=True)} if settings() else {}
    if "strftime_now" in (tokenizer.chat_template or ""):
        found["date"] = time.strftime("%Y-%m-%d")
    return found


@functools.cache  # the commit of the code that was loaded, whatever is committed later
def commit(root: Path = ROOT) -> str | None:
    """Return the commit of a checkout, followed by " and changes" if code differs from it; None outside a checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():  # installed into another project's checkout
        return None
    name = git("rev-parse", "--short=10", "HEAD")
    if name is None:
        return None
    return f"{name} and changes" if git("status", "--porcelain", "--", *CODE) else name


def check_same(place: Path, there: Mapping[str, str] | None, here: Mapping[str, str]) -> None:
    """Check that the results in ``place`` were made with the same model and tokenizer, before they are continued.

    ``there`` are their fingerprints, None if they have none, and ``here`` those of this run.
    """
    if not there:
        raise ValueError(f"{place} does not say what weights it was made with; name another folder and start there.")
    differing = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if differing:
        values = ", ".join(f"{_brief(there.get(name))}, now {_brief(here.get(name))}" for name in differing)
        raise ValueError(f"{place} was made with different {' and '.join(differing)} ({values}); name another folder.")


def _brief(value: str | None) -> str:
    return "none" if value is None else repr(value[:16])
