"""Folders of models and predictors that are missing, damaged, half written or lie: refused in one sentence, unread."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from tests.bad_input.campaign import calls, refused, state_of
from tests.models.test_config import of  # noqa: F401  for damages.txt

pytestmark = pytest.mark.bad_input

GOLDEN = Path(__file__).parents[1] / "models" / "golden"
Change = Callable[[Path], Any]
GONE = object()
SLIDING = {"use_sliding_window": True, "sliding_window": 4}
KEY = "model.layers.1.self_attn.k_proj.weight"


def write(name: str, content: bytes | str) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def drop(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def cut(name: str, share: float) -> Change:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(share * len(data))])

    return change


def config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        raw = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({name: value for name, value in raw.items() if value is not GONE}))

    return change


def tensors(function: Callable[[dict[str, np.ndarray]], Any]) -> Change:
    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        function(held)
        save_file(held, folder / "model.safetensors")

    return change


def put(held: dict[str, np.ndarray], value: float) -> None:
    held["model.layers.1.mlp.down_proj.weight"][-1, -1] = value


def index(content: Any) -> Change:
    """Names shards by an index in place of the one file, of which there are two copies."""

    def change(folder: Path) -> None:
        shutil.copy(folder / "model.safetensors", folder / "two.safetensors")
        (folder / "model.safetensors").rename(folder / "one.safetensors")
        write("model.safetensors.index.json", content if isinstance(content, str) else json.dumps(content))(folder)

    return change


def header(length: int, content: bytes = b"") -> Change:
    return write("model.safetensors", length.to_bytes(8, "little") + content)


def a_folder_in_its_place(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def a_link_to_nothing(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "nowhere")

    return change


def renamed(before: str, after: str) -> Change:
    return lambda folder: (folder / before).rename(folder / after)


def broken(folder: Path) -> None:
    held = load_file(folder / "butler.safetensors")
    next(iter(held.values()))[...] = np.nan
    save_file(held, folder / "butler.safetensors")


MISSING = ("has no config.json", "neither model.safetensors nor", "lacks the file")  # these are FileNotFoundErrors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "whole"
    shutil.copytree(GOLDEN / "llama3", folder, ignore=shutil.ignore_patterns("golden.npz"))
    shutil.copy(GOLDEN / "tokenizer" / "tokenizer.json", folder)
    assert models.load(folder)[1] is not None  # whole, it loads
    return folder


def damaged(whole: Path, to: Path, change: Change) -> Path:
    shutil.copytree(whole, to)
    change(to)
    return to


@pytest.mark.parametrize(("change", "said"), calls("damages.txt"))
def test_a_damaged_model_is_refused(whole, tmp_path, change, said):
    folder = damaged(whole, tmp_path / "model", eval(change))
    before = state_of(folder)
    error = refused(functools.partial(models.load, folder))
    assert state_of(folder) == before and said in str(error)
    if said:
        assert isinstance(error, FileNotFoundError) == said.startswith(MISSING), error
        assert error.__suppress_context__ or error.__context__ is None


@pytest.mark.parametrize(("change", "said"), calls("predictors.txt"))
def test_a_damaged_predictor_is_refused(tmp_path, retriever, change, said):
    folder = damaged(Path(models.__file__).parent / "retriever" / "butler", tmp_path / "butler", eval(change))
    before = state_of(folder)
    error = refused(functools.partial(models.load_network, folder, retriever))
    assert state_of(folder) == before and said in str(error)


@pytest.fixture(scope="module")
def retriever() -> models.Decoder:
    return models.load("retriever")[0]
