"""Command lines that cannot work: exit code 2 and one sentence, nothing written, nothing good touched."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path

import pytest

import models
from evals import __main__ as evals
from models import calibrate, cli, engine
from tests.bad_input.campaign import Terminal, state_of
from train import butler, retriever, scorer

pytestmark = pytest.mark.bad_input

MAINS = {"generate": cli.main, "calibrate": calibrate.main, "evals": evals.main}
MAINS |= {"train.butler": butler.main, "train.scorer": scorer.main, "train.retriever": retriever.main}
HEADER = '{"evaluation": "ruler", "settings": {}, "command": "python -m evals ruler", "environments": []}'
SWEEP = 'models = ["retriever"]\npolicies = ["full"]\n'


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
        + '[tasks.needle]\nlengths = [64]\nfacts = 1\n[tasks.ruler]\ntasks = ["vt"]\nlengths = [256]\n',
        "window.toml": 'policies = ["snapkv"]\nbudgets = [0.1]\n[tasks.needle]\nlengths = [64]\nfacts = 1\n',
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
        "data": {"qasper.jsonl": "not json\n"}, "emptydata": {"qasper.jsonl": ""},
        "fielddata": {"qasper.jsonl": "{}\n"}, "binarydata": {"qasper.jsonl": "\udcff"},
        "claims": {"ablation-laprox.json": '{"half'}, "yaml": {"mine.yaml": "task: mine\n  dataset_path: [\n"},
    }  # fmt: skip
    for name, files in results.items():
        (folder / name).mkdir()
        for file, content in files.items():
            (folder / name / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    untold = folder / "untold"
    ignored = shutil.ignore_patterns("tokenizer*", "butler", "log.jsonl", "RECIPE.md")
    shutil.copytree(Path(models.__file__).parent / "retriever", untold, ignore=ignored)
    return folder


LONG = "x" * 5000  # more than a file's name may have
GENERATE = """
retriever --prompt-file {long} | {long} --prompt x | retriever --prompt-file nowhere.txt
retriever --prompt-file folder | retriever --prompt-file empty.txt | retriever --prompt-file blank.txt
retriever --prompt-file picture.txt | retriever --prompt "" | retriever --prompt " " | nowhere --prompt x
good.txt --prompt x | empty --prompt x | folder --prompt x | "" --prompt x | untold --prompt x | --prompt x
retriever --prompt \udcff | ~nouser/x --prompt x
"""
ASKED = """
--prompt-file good.txt | --unknown | extra | --budget | --budget many --policy h2o | --budget 0 --policy h2o
--budget -5 --policy h2o | --budget 1.5 --policy h2o | --budget nan --policy h2o | --budget inf --policy h2o
--budget 0.0 --policy h2o | --budget 99999999999999 --policy h2o | --budget 64 | --policy h2o | --policy "" --budget 8
--policy h2oo --budget 8 | --policy "h2o+(" --budget 8 | --policy snapkv --budget 8 | --policy "h2o@modle" --budget 8
--policy "__import__('os').abort()" --budget 8 | --block 0 --policy h2o --budget 8 | --block -1 | --block big
--block 2.5 | --max-new-tokens 0 | --max-new-tokens 99999999 | --max-new-tokens x | --temperature -1
--temperature nan | --temperature hot | --temperature inf | --top-k 0 | --top-k -3 | --top-p 0 | --top-p 2
--top-p nan | --cache-dtype int4 | --cache-dtype "" | --cache-dtype | --cache-dtype int8/int8/int8
--cache-dtype int8,int8 | --dtype float8 | --dtype "" | --dtype int32 | --mesh "" | --mesh two | --mesh data=0
--mesh data=9999 | --mesh tensor=3 | --mesh data=2 | --when never | --evict-every -1 --policy h2o --budget 8
--select oracel --budget 1 | --select oracle | --select oracle --budget 0 | --select oracle --budget 99999
--select oracle --budget 0.5 --sinks -1 | --select oracle --budget 0.5 --policy h2o
--select butler --budget 0.5 --butler nowhere | --butler empty | --policy zap --budget 8
--policy zap --budget 8 --scorer nowhere | --policy q_filters --budget 8 | --policy h2o@duo --budget 8
--policy "q_filters(file='picture.txt')" --budget 8 | --policy "h2o@headkv(file='nowhere.npy')" --budget 8
--policy kvzip(chunk=0) --budget 8 | --policy kvzip@cake --budget 8 | --policy dapq(window=0) --budget 8
--policy dapq --budget 40 --block 16 | --policy h2o+merge@layer --budget 8 | --policy h2o+cam(window=0) --budget 8
--select butler --budget 0.5 --butler predictor | --chat | --question \udcff | --policy \udcff | --seed x
--seed 99999999999999999999999
"""
EVERY_EVAL = """
--model nowhere | --model good.txt | --model empty | --model untold | --batch 0 | --batch -1 | --batch x | --block 0
--cache-dtype int4 | --cache-dtype "" | --cache-dtype int8/ | --dtype float8 | --mesh nine | --mesh data=9999
--policies "" | --policies h2oo | --policies "h2o+(" | --policies snapkv --budgets 8 | --policies h2o --budgets ""
--policies h2o --budgets 0 | --policies h2o --budgets -1 | --policies h2o --budgets many
--policies h2o --budgets 1.5 | --policies h2o --budgets nan | --allocations fair --policies h2o | --when never
--when "" | --question later | --question "" | --json nowhere/x.json | --json folder | --plot picture | --plot x.bmp
--plot nowhere/x.png | --plot folder | --unknown 1 | stray
"""
SAMPLED = "--lengths 0 | --lengths -5 | --lengths far | --lengths '' | --lengths 2.5 | --lengths 8 | --samples 0"
SAMPLED += " | --samples x"
NEEDLE = SAMPLED + " | --policies snapkv --budgets 0.1 --lengths 64 --facts 1"
NEEDLE += " | --mesh data=2 --batch 3 --lengths 64 --facts 1 --policies full"
NEEDLE += " | --depths 0 | --facts 0 | --lengths 64 --facts 50 | --facts 99999"
KEPT = """
--out good.txt | --out good.txt/run | --out full | --out noheader | --out halfheader | --out listheader | --out others
--out othersettings | --out numbers
"""
RULER = SAMPLED + "|" + KEPT + """
| --tasks golf | --tasks "" | --essays nowhere.txt | --essays empty.txt | --essays picture.txt | --essays half.json
--essays list.json | --essays folder | --qa nowhere.json | --qa half.json --tasks qa_1 | --qa list.json --tasks qa_1
--qa qa.json --tasks qa_1 | --qa hotpot.json --tasks qa_1 | --prompts half.json | --prompts list.json
--prompts prompts.json | --prompts nowhere.json | --tasks qa_1
"""  # fmt: skip
DOCUMENTS = KEPT + """
| --data nowhere | --data good.txt | --data empty | --data data --tasks golf | --data data --tasks trec
--samples 0 --data data | --length 0 --data data | --data data --tasks qasper --prompts nowhere
--data data --tasks qasper --prompts half.json | --data data --tasks qasper | --data emptydata --tasks qasper
--data fielddata --tasks qasper | --data binarydata --tasks qasper | --data fielddata --tasks qasper --chat
"""  # fmt: skip
FIDELITY = """
--policies h2oo | --policies full --budgets 0 | --budgets many --policies h2o | --lengths 0 | --samples 0
--when never | --question later | --plot x.bmp | --heads nowhere/x.png | --json folder | --model nowhere | --block 0
--dtype float8 | --coordinator x | --mesh nine
"""
ABLATION = """
golf | laprox --length 0 | laprox --depths 0 | laprox --samples 0 | laprox --json folder | laprox --plot x.bmp
laprox --model nowhere | laprox --json half.json --resume | laprox --json list.json --resume
laprox --json good.json --resume | claims --results nowhere | claims --results empty | claims --results claims
claims --results good.txt | laprox --length 9999999 | laprox --resume
"""
SELECTIONS = """
--select golf | --select "" | --select "quest(page_size=0)" | --sparsity 2 | --sparsity "" | --sparsity 0,...
--sparsity x | --sparsity nan | --sparsity 1 | --sinks -1 | --batch 0 | --butler nowhere
--butler empty --select butler | --model nowhere | --json folder | --plot x.bmp | --dtype float8 | --heads all
"""
COREF = (
    SELECTIONS + "| --coordinator x | --mesh nine | --mode sing | --mode '' | --samples 0 | --block 0 --mode generate"
)
COREF += (
    " | --when prompt | --evict-every 0 | --mode generate --when never | --mode generate --select h2o --evict-every -1"
)
TEXTS = """
--text nowhere.txt | --text folder | --text picture.txt | --text empty.txt | --text short.txt | --chunk 0 | --chunk 1
--chunk 99999999 | --stride 0 | --stride 9999 | --sequences 0
"""
PERPLEXITY = SELECTIONS + "|" + TEXTS + "| --policies h2oo | --policies h2o --budgets 0 | --policies h2o --block 0"
PERPLEXITY += " | --coordinator x | --mesh nine"
PERPLEXITY += " | --policies '' | --policies h2o --when prompt | --policies h2o --when never | --policies h2o --when ''"
CHOICES = (
    EVERY_EVAL
    + """
| --tasks golf | --tasks '' | --samples 0 | --lengths 0 | --lengths 8 | --lengths x | --evict-every 1 | --out good.txt
--text nowhere.txt | --text folder | --text picture.txt | --text empty.txt | --text short.txt
"""
)
LM_EVAL = """
--tasks piqa | --model_args pretrained=retriever | --tasks "" --model_args pretrained=retriever
--tasks x --model_args pretrained | --tasks x --model_args pretrained=retriever,policy=h2oo
--tasks x --model_args pretrained=retriever,policy=h2o,budget=0 | --tasks x --model_args pretrained=retriever,block=0
--tasks x --model_args pretrained=retriever --limit 0 | --tasks x --model_args pretrained=retriever --batch 0
--tasks x --model_args pretrained=retriever --include_path nowhere
--tasks x --model_args pretrained=retriever --json folder | --tasks x --model_args pretrained=retriever --out good.txt
--tasks x --model_args pretrained=retriever,select=golf,budget=0.5
"""
SWEEPS = """
nowhere.toml --out new | half.toml --out new | list.toml --out new | picture.txt --out new | folder --out new
unknown.toml --out new | notask.toml --out new | badtask.toml --out new | badflag.toml --out new
badvalue.toml --out new | nomodel.toml --out new | badpolicy.toml --out new | badbudget.toml --out new
nested.toml --out new | date.toml --out new | misfit.toml --out new | window.toml --out new | unknown.toml
badtask.toml --out full
"""
REPORT = """
nowhere | good.txt | empty | full | noheader | halfheader | listheader | numbers | norecords | badrecord | garbage
badsweep | emptyrecord
"""
VIEW = """
--html nowhere/x.html | --html folder | --policies "" --html x.html | --policies h2oo --html x.html
--budget 0 --html x.html | --budget many --html x.html | --block 0 --html x.html | --length 0 --html x.html
--max-new-tokens 0 --html x.html | --prompt-file nowhere.txt --html x.html | --prompt-file empty.txt --html x.html
--prompt-file picture.txt --html x.html | --model nowhere --html x.html | --when never --html x.html | --policies full
"""
EVALS = {
    "needle": EVERY_EVAL + "|" + NEEDLE,
    "ruler": EVERY_EVAL + "|" + RULER,
    "longbench": DOCUMENTS,
    "infinitebench": "--data nowhere | --data empty | --data data --tasks golf | --data data --samples 0",
    "fidelity": FIDELITY,
    "ablation": ABLATION,
    "field": "nowhere.json | good.txt | picture.txt | folder | nowhere.json --plot x.golf",
    "rounding": "--model nowhere | --text nowhere.txt | --text good.txt picture.txt | --chunk 0 | --chunk 9999999 | "
    "--text good.txt --sequences 0 | --json folder | --text", "coref": COREF, "perplexity": PERPLEXITY,
    "choices": CHOICES, "texts": "iliad | --golf | king-james-bible iliad",
    "butler": "accuracy --select golf | golf | accuracy --sparsity 2 | accuracy --text nowhere.txt | layers --chunk 0",
    "lm_eval": LM_EVAL, "sweep": SWEEPS, "report": REPORT, "view": VIEW,
}  # fmt: skip
BUTLER = """
--model nowhere | --model untold --data good.txt | --model empty | --tokens 0 | --tokens x | --tokens 1e99
--tokens nan | --tokens 10 | --seq-len 0 | --seq-len 99999999 | --seq-len x | --batch 0 | --lr 0 | --lr -1 | --lr nan
--lr x | --warmup 1 | --warmup -1 | --clip 0 | --weight-decay -1 | --dropout 2 | --hidden 0 | --dim 0 | --dim 3
--source layer9 | --save-every 0 | --keep 0 | --eval-every -1 | --log-every 0 | --eval-rows 0 | --stop-after 0
--resume maybe | --mesh nine | --mesh data=9999 | --mesh data=3 | --dtype float8 | --coordinator x
--processes 2 --process-id 5 --coordinator x:1 | --budget 0 | --budget 2 | --out good.txt | --out predictor
--out run | --data nowhere.txt | --data empty.txt | --data picture.txt | --data bad.jsonl | --data nofield.jsonl
--data number.jsonl | --data torn.jsonl.zst | --data torn.jsonl.gz | --data empty | --data empty.jsonl
--data good.txt --eval-data nowhere.txt | --data short.txt
"""
CALIBRATE = """
retriever --text good.txt | retriever --text nowhere.txt --heads h.npy | retriever --text picture.txt --heads h.npy
retriever --text good.txt --heads h.txt | retriever --text good.txt --q-filters folder.npy/x.npy
retriever --text empty.txt --heads h.npy | retriever --text good.txt --heads h.npy --length 99999999
retriever --text good.txt --heads h.npy --rows 0 | retriever --text good.txt --heads h.npy --length 0
nowhere --text good.txt --heads h.npy | retriever --text good.txt --heads h.npy --dtype float8
"""
SCORER = """
--target golf | --hidden -1 | --seq-len 99999999 | --budget 0 | --budget 2 | --tokens 0 | --out good.txt
--data nowhere.txt
"""
RETRIEVER = """
--out good.txt | --work good.txt | --from nowhere | --keep 2 | --keep 0.5 | --devices 0 | --samples -1
--stop-after 0 | --resume maybe | --unknown
"""
TOP = ["", "golf", "--unknown", "needle --json"]


def lines(text: str) -> list[str]:
    return [part.strip() for part in text.replace("\n", "|").split("|") if part.strip()]


# Evaluations that read a table after another one: what the first shows runs in the matrix for them.
SAME = {"ruler": EVERY_EVAL, "choices": EVERY_EVAL, "longbench": KEPT, "perplexity": SELECTIONS}


def rows(command: str, text: str, begins: str = "") -> list:
    """Return the cases of a command whose lines begin so, for example with the name of an evaluation."""
    same, found = lines(SAME.get(begins, "")), []
    for own in lines(text):
        line = f"{begins} {own}".strip()
        marks = [pytest.mark.matrix] * (own in same)
        found.append(pytest.param(command, line, marks=marks, id=ascii(f"{command} {line}")[1:100]))
    return found


CASES = (
    rows("generate", GENERATE)
    + rows("generate", ASKED, "retriever --prompt x")
    + rows("calibrate", CALIBRATE)
    + rows("train.butler", BUTLER)
)
CASES += rows("train.retriever", RETRIEVER) + rows("train.scorer", SCORER)
CASES += [pytest.param("evals", line, id=f"evals {line}") for line in TOP]
CASES += [case for name, text in EVALS.items() for case in rows("evals", text, name)]


@pytest.fixture
def place(monkeypatch):
    """A working directory; pytest's own tmp_path looks through all that tests before had."""
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
        patch.chdir(folder)
        yield Path(folder)


@pytest.mark.parametrize(("command", "line"), CASES)
def test_a_command_ends_in_one_sentence(command, line, inputs: Path, place: Path, terminal: Terminal, monkeypatch):
    monkeypatch.setattr(engine, "_fed", None)  # all that can be known is known before the first step
    for path in inputs.iterdir():
        if path.name in line:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, place / path.name)
    before, names = state_of(place), os.listdir(place)
    said = terminal.refuses(MAINS[command], shlex.split(line.replace("{long}", LONG)))
    assert "error: " in said
    assert state_of(place) == before
    assert os.listdir(place) == names, "a refused command leaves nothing behind"
