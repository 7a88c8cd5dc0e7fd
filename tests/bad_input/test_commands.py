"""Command lines that cannot work: exit code 2 and one sentence, nothing written, nothing good touched."""

import json
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

import pytest

import models
from benchmarks import __main__ as benchmarks
from benchmarks import measure, tpu_compile
from evals import __main__ as evals
from models import calibrate, cli, engine
from tests.bad_input.campaign import Terminal, state_of
from train import butler, finetune, retriever, scorer

pytestmark = pytest.mark.bad_input

MAINS = {"generate": cli.main, "calibrate": calibrate.main, "evals": evals.main}
MAINS |= {f"train.{module.__name__[6:]}": module.main for module in (butler, finetune, retriever, scorer)}
MAINS["benchmarks"] = benchmarks.main
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
        + '[tasks.needle]\nlengths = [64]\nfacts = 1\n[tasks.ruler]\ntasks = ["vt"]\nlengths = [256]\n',
        "window.toml": 'policies = ["snapkv"]\nbudgets = [0.1]\n[tasks.needle]\nlengths = [64]\nfacts = 1\n',
        "budgets.toml": SWEEP + "[tasks.ruler]\nbudgets = 3\n",
        "onemodel.toml": "models = 'retriever'\n[tasks.ruler]\n",
        "table.toml": "policies = {}\n[tasks.ruler]\n", "block.toml": "block = 'x'\n[tasks.ruler]\n",
        "nosamples.toml": "[tasks.needle]\nsamples = 0\n", "nodata.toml": "[tasks.longbench]\n",
        "import.toml": "import = 3\n[tasks.ruler]\n",
        "sentences.txt": " ".join(f"A boat with a crew of {i} men went by the town." for i in range(600)),
        "text.jsonl": (json.dumps({"text": CODE}) + "\n") * 99, "halfqa.jsonl": QA + '{"prompt": "The code"}\n',
        "qa.jsonl": QA * 9,
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
        "pages/images": {},
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
--against h2oo | --against select=golf | --against "" | --against snapkv --budgets 8 |
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
DOCUMENTS = """
--data nowhere | --data good.txt | --data empty | --data data --tasks golf | --data data --tasks trec
--samples 0 --data data | --length 0 --data data | --data data --tasks qasper --prompts nowhere
--data data --tasks qasper --prompts half.json | --data data --tasks qasper | --data emptydata --tasks qasper
--data fielddata --tasks qasper | --data binarydata --tasks qasper | --data fielddata --tasks qasper --chat
"""  # fmt: skip
FIDELITY = """
--policies h2oo | --policies full --budgets 0 | --budgets many --policies h2o | --lengths 0 | --samples 0
--when never | --question later | --plot x.bmp | --heads nowhere/x.png | --json folder | --model nowhere | --block 0
--dtype float8 | --coordinator x | --mesh nine | --against h2oo --policies h2o | --against select=quest
"""
REGRET = """
--policies h2oo | --policies full | --policies select=quest | --budget many --policies tova | --budget 0 --policies tova
--budget 0.25,0.5 | --length 0 | --length 20 | --samples 0 | --layers 0 | --nodes -1 | --exact -1 | --facts 0
--block 0 | --question later | --target golf | --plot x.bmp | --json folder | --model nowhere | --dtype float8
--recall nowhere | --recall good.txt | --out full
"""
SELECTIONS = """
--select golf | --select "" | --select "quest(page_size=0)" | --sparsity 2 | --sparsity "" | --sparsity 0,...
--sparsity x | --sparsity nan | --sparsity 1 | --sinks -1 | --batch 0 | --butler nowhere
--butler empty --select butler | --model nowhere | --json folder | --plot x.bmp | --dtype float8 | --heads all
"""
COREF = (
    SELECTIONS + "| --coordinator x | --mesh nine | --mode sing | --mode '' | --samples 0 | --block 0 --mode generate"
)
COREF += " | --when prompt | --evict-every 0 | --mode generate --when never | --against golf"
COREF += " | --mode generate --select h2o --evict-every -1"
TEXTS = """
--text nowhere.txt | --text folder | --text picture.txt | --text empty.txt | --text short.txt | --chunk 0 | --chunk 1
--chunk 99999999 | --stride 0 | --stride 9999 | --sequences 0
"""
PERPLEXITY = TEXTS + "| --policies h2oo | --policies h2o --budgets 0 | --policies h2o --block 0"
PERPLEXITY += " | --coordinator x | --mesh nine | --against golf | --policies h2o --against h2oo"
PERPLEXITY += " | --policies '' | --policies h2o --when prompt | --policies h2o --when never | --policies h2o --when ''"
CHOICES = """
--tasks golf | --tasks '' | --samples 0 | --lengths 0 | --lengths 8 | --lengths x | --evict-every 1 | --out good.txt
--text nowhere.txt | --text folder | --text picture.txt | --text empty.txt | --text short.txt
"""
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
    "ruler": RULER,
    "longbench": DOCUMENTS,
    "infinitebench": "--data nowhere | --data empty | --data data --tasks golf | --data data --samples 0",
    "fidelity": FIDELITY, "regret": REGRET,
    "rounding": "--model nowhere | --text nowhere.txt | --text good.txt picture.txt | --chunk 0 | --chunk 9999999 | "
    "--text good.txt --sequences 0 | --json folder | --text", "coref": COREF, "perplexity": PERPLEXITY,
    "choices": CHOICES, "texts": "nowhere | --golf | folder iliad | folder",
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
TOP = "golf | --unknown | needle --json"


# Of each command, the lines of which is known what is said; the others only have to end in one sentence.
SAID = """
evals choices:
--lengths 20 --text sentences.txt -> no continuation of 20 tokens was found in the text
--text python-doc -> python-doc is not here yet
--tasks section --text short.txt -> has 0 sentences
--tasks section --text sentences.txt -> fewer than 2 titled sections
evals coref:
--mode generate --when never -> unknown --when 'never'; expected one of block, prompt, published
--when prompt -> add --mode generate, or leave them out
--mode generate --select oracle_eviction -> 'oracle_eviction' can only be simulated
evals needle:
--model nowhere -> there is no folder nowhere
--policies h2oo -> unknown policy 'h2oo'
--policies snapvk+caote --budgets 8 -> Did you mean 'snapkv'?
--policies , -> no policy was given
--policies snapkv --budgets 16 -> always keeps
--question beside -> unknown --question 'beside'; expected one of known, before, both, unknown
--policies key_norm --allocations lava --budgets 64 -> key_norm
--policies select=quests --budgets 64 -> unknown source 'quests'
--policies select= --budgets 64 -> is malformed
--lengths 16 -> more than the length 16
--plot x.bmp -> suffix '.bmp'
--json nowhere/x.json -> the folder nowhere does not exist
evals perplexity:
--policies h2o --against select=quest -> policies are compared with a policy here
--policies random --when published -> no paper says when 'random' evicts
--select , -> no selection was given
--sinks -1 -> --sinks is -1
--text picture.txt -> is not UTF-8 text (byte 0)
--text short.txt -> do not fill a chunk of 512
--text good.txt --chunk 99999 -> retriever takes 4096 positions
--text good.txt --chunk 8 --sequences 0 -> 0 sequences were asked for
--policies zap --budgets 32 -> scorer
--model lonely --text good.txt --chunk 8 -> lonely has no predictor in its folder 'butler'; train one with
evals ruler:
--tasks golf -> unknown --tasks 'golf'; expected one of all, niah_single_1
--tasks qa_1 -> qa_1: no file of questions and documents was named
--lengths 128 -> give a greater length
--essays nowhere.txt -> there is no essays file nowhere.txt
--chat -> has no chat template
--data empty -> empty has no niah_single_1/validation.jsonl
--data samples --essays x --lengths 64 -> leave out --essays, --lengths.
--data hub -> RULER publishes scripts, not samples
--data samples --tasks vt -> vt, record 2, lacks what its prompt or score needs
--data samples --tasks cwe -> outputs is no list of answers
--data samples --tasks fwe -> the prompt and its answer take
--out full -> not empty, and holds no header
evals longbench:
--policies full -> no data was named
--data empty -> has no narrativeqa.jsonl
--data badrecords --tasks trec --length 64 -> trec.jsonl, line 2, of badrecords is no JSON object
--data badrecords --tasks lcc --length 64 -> lcc, record 1, lacks
--data badrecords --tasks trec --prompts empty -> there is no JSON file empty/dataset2prompt.json
evals booksum:
--data empty -> has no test.csv
--data csv/open -> is no CSV
--data csv/wide -> record 1 has other columns
--data csv/short -> record 2 has other columns
--data csv/none --length 100 -> is empty
--data csv/fields --length 100 -> booksum, record 1, lacks what its prompt or score needs ('chapter')
evals view:
--html x.html --policies snapkv --budget 8 -> always keeps
evals butler:
accuracy --select h2o -> 'h2o' is not a source of importance
agreement --select oracle -> leave --select and --sparsity out
oracles --sparsity 0,0.1,...,0.75 -> 0.75 is not reached from 0.1 by 0.1
choices --stride 8 -> choices are drawn from it; leave it out
evals lm_eval:
--tasks piqa --model_args block=32 --against tova -> --against is tova, but the --model_args have full
--tasks piqa --model_args policy -> 'policy' in the model's arguments is not name=value
--tasks piqa --model_args block=32 --limit 0 -> --limit is 0
evals sweep:
notask.toml --out new -> has no tasks
badflag.toml --out new -> [tasks.needle] has 'club'; expected
budgets.toml --out new -> [tasks.ruler] has 'budgets'
unknown.toml --out new -> the sweep has colour; expected models
table.toml --out new -> policies is {}; give a text
block.toml --out new -> invalid int value
onemodel.toml --out new -> models is 'retriever'; give a list
nosamples.toml --out new -> give at least 1 of each
nodata.toml --out new -> no data was named
import.toml --out new -> import is 3; give the name of a module
train.butler:
--data python --seq-len 9999 -> --seq-len is 9999; the model takes sequences of 2 to
--tokens 8 --seq-len 64 --batch 1 -> --tokens is 8; one step of 1 x 64 takes 64
--mesh data=2 --batch 1 -> a step of 1 rows cannot be spread over data=2
--processes 2 -> belong together
train.retriever:
--keep 0.3 -> --keep is 0.3; expected a share from 0 to less than 1, and --from
train.finetune --model retriever --seq-len 48 --batch 2 --tokens 192 --block 16 --budget 16 --eval-rows 2:
--policy tova --data text.jsonl --when prompt -> 'tova' evicts once, after the last token of a text
--policy tova --data text.jsonl --chat -> --chat is for prompts with answers
--data qa.jsonl --policy butler+caote -> scores by a network that was trained for the frozen model
--data qa.jsonl --policy snapkv -> 'snapkv' observes the last 32 queries, but a block has 16
--data qa.jsonl --policy snapkv(window=16)+protect(sinks=4) -> the budget is 16 tokens, but
--data qa.jsonl --policy h2o@layer -> 'h2o@layer' moves tokens between pages after each block
--data qa.jsonl --policy kvzip --when prompt -> has the model repeat its prompt
--data qa.jsonl --policy snapkv(window=16) --budget 0.3 -> qa.jsonl, line 1: the budget is
--data qa.jsonl --policy tova --lora-on query -> --lora-on was given without --lora
--data qa.jsonl --policy tova --lora 2 --lora-on quary -> unknown --lora-on 'quary'; expected one of query, key
--data qa.jsonl --policy tova --seq-len 4 -> prompt and answer have
--data qa.jsonl --policy tova --eval-rows 9 -> holds nothing but the 9 held-out rows
--data halfqa.jsonl --policy tova -> halfqa.jsonl, line 2: it has no text in "prompt" or in "answer"
--model lonely --policy tova -> no data was named
benchmarks butler:
--models gpt -> unknown --models 'gpt'; expected one of Llama-3.2-1B
--shares 2.5 -> 2.5
--plot shares.txt -> shares.txt
--json no/such/folder/x.json -> no/such/folder
benchmarks decode:
--policy snapkv@model -> all heads have the same budget
--prompts 100 --budgets 1024 -> a prompt must fill its budget
--shapes llama-3.1-8b --memory 0.01 -> but 0.01 GiB are free here
benchmarks prefill:
--policy snapkv@model -> all heads have the same budget
benchmarks fixed_memory:
--model retriever --policies snapvk -> Did you mean 'snapkv'?
--model retriever --when never -> unknown --when 'never'
--model retriever --prompts 0 -> --prompts has '0'
benchmarks kernels:
--implementations cudnn -> unknown implementation 'cudnn'; expected one of auto, reference
--implementations pallas_gpu -> runs on a gpu, but this is a cpu; auto, reference can run here
--implementations pallas_gpu --interpret --operations mse_logits -> no operation out of
--shapes llama-3.1-8b --memory 0.01 -> but 0.01 GiB are free here
--memory 0 -> --memory is 0.0
--batches 0 -> --batches has '0'
benchmarks selection:
--model retriever --shares 2 -> give shares of the tokens
benchmarks soak:
--tokens 100 -> 20 parts
--budget 7 -> --budget is 7
--tokens 0 --requests 0 --kills 0 -> are all 0
--tokens 0 --requests 0 --plot soak.png -> --plot draws tokens and requests
benchmarks cpu:
--against nowhere.json -> nowhere.json
--against good.json -> holds no results of `python -m benchmarks cpu
benchmarks report:
--results empty --docs pages -> holds no results
benchmarks tpu_compile:
--shapes gpt -> unknown shape 'gpt'
"""


def lines(text: str) -> list[str]:
    return [part.strip() for part in text.replace("\n", "|").split("|") if part.strip()]


def by_command(text: str) -> dict[str, list[str]]:
    """Return the lines below each heading, which ends with a colon."""
    parts = re.split(r"^(.*):$", text.strip(), flags=re.MULTILINE)[1:]
    return {name: body.strip().split("\n") for name, body in zip(parts[::2], parts[1::2], strict=True)}


TOLD = by_command(SAID)


def rows(command: str, text: str, begins: str = "") -> list:
    """Return the cases of a command whose lines begin so, for example with the name of an evaluation."""
    found = []
    told = TOLD.get(f"{command} {begins}".strip(), [])
    known = {own.partition(" -> ")[0] for own in told}
    for own in [*told, *(own for own in lines(text) if own not in known)]:
        flags, _, said = own.partition(" -> ")
        line = f"{begins} {flags}".strip()
        found.append(pytest.param(command, line, said, id=ascii(f"{command} {line}")[1:100]))
    return found


TABLES = {"generate": GENERATE, "generate retriever --prompt x": ASKED, "calibrate": CALIBRATE, "evals": TOP}
TABLES |= {"train.butler": BUTLER, "train.retriever": RETRIEVER, "train.scorer": SCORER}
TABLES |= {f"evals {name}": text for name, text in EVALS.items()}
CASES = [
    case
    for name in TABLES | TOLD
    for command, _, begins in [name.partition(" ")]
    for case in rows(command, TABLES.get(name, ""), begins)
]


@pytest.fixture
def place(monkeypatch):
    """A working directory; pytest's own tmp_path looks through all that tests before had."""
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
        patch.chdir(folder)
        yield Path(folder)


@pytest.mark.parametrize(("command", "line", "said"), CASES)
def test_a_command_ends_in_one_sentence(command, line, said, inputs, place: Path, terminal: Terminal, monkeypatch):
    monkeypatch.setattr(engine, "_feed_prompt", None)  # all that can be known is known before the first step
    monkeypatch.setattr(measure, "device", lambda **_: measure.Device(1e9, 1e9))
    monkeypatch.setattr(tpu_compile, "tpu_chips", lambda topology: (None,) * 8)
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")
    for path in inputs.iterdir():
        if path.name in line:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, place / path.name)
    before, names = state_of(place), os.listdir(place)
    sentence = terminal.refuses(MAINS[command], shlex.split(line.replace("{long}", LONG)))
    assert "error: " in sentence and said in sentence
    assert state_of(place) == before
    assert os.listdir(place) == names, "a refused command leaves nothing behind"
