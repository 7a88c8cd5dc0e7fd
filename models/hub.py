"""Models on the Hugging Face hub, downloaded into its own cache in the user's folder, which other libraries share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
READ = ["*.json", "*.safetensors", "*.jinja"]
# Second copies of the weights, in their authors' layout.
IGNORED = ["original/*", "consolidated*"]


def find(name: str, revision: str | None = None) -> Path:
    """Return a model's folder, after downloading what is missing or new; or the GGUF file that was fetched of it.

    Without a network, what was downloaded before is taken.

    Raises:
        FileNotFoundError: there is no such model, it cannot be downloaded, or huggingface_hub is not installed.
        ValueError: several GGUF files of it were fetched.
    """
    hub, fetched = _package(name), []
    with _in_one_sentence(name, revision), contextlib.suppress(hub.errors.LocalEntryNotFoundError):
        here = Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
        fetched = [] if any(here.glob("*.safetensors")) else sorted(here.rglob("*.gguf"))
    if len(fetched) > 1:
        raise ValueError(f"several files of {name} were fetched; give one: {', '.join(map(str, fetched))}.")
    return fetched[0] if fetched else fetch(name, revision)


def fetch(name: str, revision: str | None = None, file: str | None = None) -> Path:
    """Download the files of a model that are read, or one file; a download that was cut off goes on."""
    hub = _package(name)
    with _in_one_sentence(name, revision):
        if file is not None:
            return Path(hub.hf_hub_download(name, file, revision=revision))
        patterns: dict[str, Any] = dict(allow_patterns=READ, ignore_patterns=IGNORED)
        return Path(hub.snapshot_download(name, revision=revision, **patterns))


def listed(name: str) -> list[str]:
    """Return the names of a model's files on the hub."""
    hub = _package(name)
    with _in_one_sentence(name, None):
        return sorted(hub.HfApi().list_repo_files(name))


def _package(name: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise FileNotFoundError(f"there is no folder {name}; to download it, pip install huggingface_hub.") from None
    return huggingface_hub


@contextlib.contextmanager
def _in_one_sentence(name: str, revision: str | None) -> Iterator[None]:
    """Say what went wrong: the hub's, the HTTP client's and the disk's errors have no common base."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()).partition(". ")[0][:200].rstrip(".")
        at = f" at revision {revision}" if revision else ""
        said = f"there is no folder {name}, and downloading it from the Hugging Face hub{at} failed"
        raise FileNotFoundError(f"{said} ({type(error).__name__}: {reason}); check the name and the network.") from None
