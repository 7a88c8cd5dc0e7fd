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
from models import host_steps
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
HEADER = '{"evaluation": "ruler", "settings": {}, "command": "python -m evals ruler", "environments": []}'
SWEEP = 'models = ["retriever"]\npolicies = ["full"]\n'
CODE = "The code of the river is 4. The code is"
QA = json.dumps({"prompt": CODE, "answer": " 4"}) + "\n"
RECORD = {"input": "Which river?", "context": "A river.", "answers": ["Elbe"], "all_classes": ["River", "Town"]}
SAMPLE = {"index": 0, "input": "The code is 4719.\nWhat is the code?", "outputs": ["4719"], "length": 60}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every file that the commands below name, most of them bad."""
    folder = tmp_path_factory.mktemp("inputs")
    text = {
        "good.txt": "The river was calm. " * 40, "empty.txt": "", "blank.txt": " \n\t\n", "short.txt": "calm",
        "good.json": '{"kept": true}', "list.json": "[1]", "half.json": '{"a": ',
        "prompts.json": '{"vt": "no field"}', "empty.jsonl": "", "bad.jsonl": '{"text": "fine"}\nnot json\n',
        "nofield.jsonl": '{"body": "x"}\n', "number.jsonl": '{"text": 3}\n', "qa.json": '{"data": 3}',
        "hotpot.json": '[{"question": "x"}]', "half.toml": "models = [", "list.toml": "tasks = 3",
        "unknown.toml": SWEEP + "colour = 1\n[tasks.needle]\n", "notask.toml": SWEEP,
        "badtask.toml": SWEEP + "[tasks.golf]\n", "badflag.toml": SWEEP + "[tasks.needle]\nclub = 1\n",
        "badvalue.toml": SWEEP + '[tasks.needle]\nlengths = ["far"]\n',
        "nomodel.toml": "models = []\n[tasks.needle]\n",
        "badpolicy.toml": 'policies = ["h2oo"]\nbudgets = [64]\n[tasks.needle]\n',
        "badbudget.toml": 'policies = ["h2o"]\nbudgets = [0]\n[tasks.needle]\n',
        "nested.toml": 'policies = [["h2o"]]\n[tasks.needle]\n',
        "date.toml": "seed = 2020-01-01\n[tasks.needle]\n",
        "misfit.toml": SWEEP
        + '[tasks.needle]\nlengths = [64]\nfacts = 1\n[tasks.ruler]\ntasks = ["vt", "cwe"]\nlengths = [256]\n',
        "window.toml": 'policies = ["snapkv"]\nbudgets = [0.1]\n[tasks.needle]\nlengths = [64]\nfacts = 1\n',
        "budgets.toml": SWEEP + "[tasks.ruler]\nbudgets = 3\n",
        "onemodel.toml": "models = 'retriever'\n[tasks.ruler]\n",
        "table.toml": "policies = {}\n[tasks.ruler]\n", "block.toml": "block = 'x'\n[tasks.ruler]\n",
        "nosamples.toml": "[tasks.needle]\nsamples = 0\n", "nodata.toml": "[tasks.longbench]\n",
        "import.toml": "import = 3\n[tasks.ruler]\n",
        "sentences.txt": " ".join(f"A boat with a crew of {i} men went by the town." for i in range(600)),
        "text.jsonl": (json.dumps({"text": CODE}) + "\n") * 99, "halfqa.jsonl": QA + '{"prompt": "The code"}\n',
        "qa.jsonl": QA * 9, "nothing.jsonl": '{"prompt": "a"}\nnothing',
        "gone.toml": 'models = ["no/where/else"]\npolicies = ["full"]\n[tasks.needle]\nlengths = [64]\nfacts = 1\n',
    }  # fmt: skip
    for name, content in text.items():
        (folder / name).write_text(content)
    (folder / "picture.txt").write_bytes(b"\x89PNG\xff\xfe\x00")
    (folder / "torn.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd torn")
    (folder / "torn.jsonl.gz").write_bytes(b"\x1f\x8b torn")
    (folder / "folder").mkdir()
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("mine")
    results = {
        "noheader": {"samples.jsonl": "{}\n"},
        "halfheader": {"header.json": '{"eval'},
        "listheader": {"header.json": "[]"},
        "others": {"header.json": HEADER.replace("ruler", "longbench")},
        "othersettings": {"header.json": HEADER},
        "numbers": {"header.json": '{"evaluation": 1, "settings": 2, "command": 3, "environments": 4}'},
        "norecords": {"header.json": HEADER},
        "badrecord": {"header.json": HEADER, "samples.jsonl": "{}\n{}\n"},
        "garbage": {"header.json": HEADER, "samples.jsonl": "\x00\x01\n\n"},
        "emptyrecord": {"header.json": HEADER, "samples.jsonl": '{"task": "vt", "sample": 0, "score": "high"}\n'},
        "badsweep": {
            "header.json": HEADER.replace('"ruler"', '"sweep"', 1),
            "samples.jsonl": '{"task": "vt", "sample": 0, "score": 1}\n',
        },
        "run": {"run.json": "{", "butler.json": "mine"}, "predictor": {"butler.json": "mine"},
        "data": {"qasper.jsonl": "not json\n"}, "aime": {"aime.jsonl": "{}\n"}, "emptydata": {"qasper.jsonl": ""},
        "fielddata": {"qasper.jsonl": "{}\n"}, "binarydata": {"qasper.jsonl": "\udcff"},
        "badrecords": {
            "trec.jsonl": json.dumps(RECORD) + "\n[1]\n",
            "qasper.jsonl": '{"context": "x"}\n',
            "lcc.jsonl": '{"context": "x", "answers": [3]}\n',
        },
        "samples/vt": {"validation.jsonl": json.dumps(SAMPLE) + '\n{"outputs": ["x"]}\n'},
        "samples/cwe": {"validation.jsonl": json.dumps(SAMPLE | {"outputs": "4719"})},
        "samples/fwe": {"validation.jsonl": json.dumps(SAMPLE | {"input": "The grass is green.\n" * 3000})},
        "csv/open": {"test.csv": 'chapter,summary_text\n"open'},
        "csv/wide": {"test.csv": "chapter,summary_text\na,b,c\n"},
        "csv/short": {"test.csv": "chapter,summary_text\na,b\nc\n"},
        "csv/none": {"test.csv": ""}, "csv/fields": {"test.csv": "text,summary_text\na,b\n"},
        "pages/images": {}, "odd": {"odd.json": ""}, "other": {"odd.json": '{"benchmark": "nothing", "results": []}'},
        "yaml": {"mine.yaml": "task: mine\n  dataset_path: [\n"},
    }  # fmt: skip
    for name, files in results.items():
        (folder / name).mkdir(parents=True)
        for file, content in files.items():
            (folder / name / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    for name, left_out in (("untold", ["tokenizer*", "butler"]), ("lonely", ["butler"])):
        ignored = shutil.ignore_patterns("log.jsonl", "RECIPE.md", *left_out)
        shutil.copytree(Path(models.__file__).parent / "retriever", folder / name, ignore=ignored)
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
    monkeypatch.setattr(host_steps, "feed_prompt", None)  # all that can be known is known before the first step
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
