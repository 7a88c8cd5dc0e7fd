"""Command lines that cannot work: exit code 2 and one sentence, nothing written, nothing good touched."""

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import models
from benchmarks import __main__ as benchmarks
from benchmarks import accelerator, measure, peers, tpu_compile
from evals import __main__ as evals
from models import engine
from models.commands import ask, batch, calibrate, chat, generate
from papers import __main__ as papers
from papers.retriever import recipe
from tests.bad_input.campaign import Terminal, cases, state_of
from tests.tiers import matrix
from train import butler, finetune, scorer

pytestmark = pytest.mark.bad_input

MAINS = {module.__name__.rpartition(".")[2]: module.main for module in (generate, ask, calibrate, batch, chat)}
MAINS |= {f"train.{module.__name__[6:]}": module.main for module in (butler, finetune, scorer)}
MAINS |= {"evals": evals.main, "benchmarks": benchmarks.main, "papers": papers.main}
MAINS |= {"papers.retriever.recipe": recipe.main}
LARGE = {  # of inputs, too long to be written out
    "good.txt": b"The river was calm. " * 40,
    "sentences.txt": " ".join(f"A boat with a crew of {i} men went by the town." for i in range(600)).encode(),
    "text.jsonl": b'{"text": "The code of the river is 4. The code is"}\n' * 99,
    "qa.jsonl": b'{"prompt": "The code of the river is 4. The code is", "answer": " 4"}\n' * 9,
    "samples/fwe/validation.jsonl": b'{"index": 0, "outputs": ["4719"], "length": 60, "input": "%b"}'
    % (b"The grass is green.\\n" * 3000 + b"Question: Do not provide any explanation. Which?"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every file that the commands below name, most of them bad."""
    folder = tmp_path_factory.mktemp("inputs")
    lines = (Path(__file__).parent / "inputs.txt").read_text("utf-8").splitlines()
    of_a_line = (line.partition(":")[::2] for line in lines if line[:1] not in ("", "#"))
    contents = {name: said[1:].encode().decode("unicode_escape").encode("latin-1") for name, said in of_a_line}
    for name, content in (contents | LARGE).items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(content)
    for name, left_out in (("untold", ["tokenizer*", "butler"]), ("lonely", ["butler"])):
        ignored = shutil.ignore_patterns("log.jsonl", "RECIPE.md", *left_out)
        shutil.copytree(Path(models.__file__).parent / "retriever", folder / name, ignore=ignored)
    config = folder / "lonely" / "config.json"  # another model, for which nothing ships
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    return folder


LONG = "x" * 5000  # more than a file's name may have


def commands() -> Iterator[Any]:
    """Yield commands, flags and what is said: the first of each command, and the others in the matrix."""
    before = None
    for head, flags, said in cases("commands.txt"):
        command, _, begins = head.partition(" ")
        words = f"{begins} {flags}".strip().replace(r"\udcff", "\udcff")
        marks = () if said or head != before else matrix
        before = head
        yield pytest.param(command, words, said, id=ascii(f"{command} {words}")[1:100], marks=marks)


@pytest.fixture
def place(monkeypatch):
    """A working directory; pytest's own tmp_path looks through all that tests before had."""
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
        patch.chdir(folder)
        yield Path(folder)


@pytest.mark.parametrize(("command", "line", "said"), list(commands()))
def test_a_command_ends_in_one_sentence(command, line, said, inputs, place: Path, terminal: Terminal, monkeypatch):
    monkeypatch.setattr(engine, "feed_prompt", None)  # all that can be known is known before the first step
    monkeypatch.setattr(measure, "device", lambda **_: measure.Device(1e9, 1e9))
    monkeypatch.setattr(tpu_compile, "tpu_chips", lambda topology: (None,) * 8)
    monkeypatch.setattr(peers, "checked_environment", lambda python, wanted=None: "python")
    monkeypatch.setattr(accelerator, "probe", lambda: {"platform": "gpu", "memory": 80e9})
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")
    for path in inputs.iterdir():
        if path.name in line:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, place / path.name)
    before, names = state_of(place), os.listdir(place)
    sentence = terminal.refuses(MAINS[command], shlex.split(line.replace("{long}", LONG)))
    assert "error: " in sentence and said in sentence
    assert state_of(place) == before
    assert os.listdir(place) == names, "a refused command leaves nothing behind"
