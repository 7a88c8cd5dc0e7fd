"""`python -m models.generate` as a user types it, on the embedded model."""

import importlib
import json
import re
import runpy
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import models
from models.commands import chat, generate
from tests.models import reference
from tests.models.commands.test_chat import CHATML, spaced, tokenizer_of

PROMPT = "The code of amber falcon is 4719. It was a quiet day. Question: what is the code of amber falcon? Answer:"
SMALL = ["--block", "16", "--max-new-tokens", "4"]
UNDER = ["--policy", "h2o+caote", "--budget", "16", *SMALL]  # one setting for most, compiled once


def streamed(model, tokens, **settings):
    """Return the tokens of an answer, by the programs that the command runs."""
    steps = models.stream(model, [tokens], **{"block": 16, "max_new_tokens": 4} | settings)
    return [int(token[0]) for token, _ in steps]


def test_text_or_json_have_the_tokens_of_stream(capsys):
    assert generate.main(["retriever", "--prompt", PROMPT, *UNDER]) == 0
    out, err = capsys.readouterr()
    assert "tokens in" in err and "cache" in err
    assert generate.main(["retriever", "--prompt", PROMPT, "--json", *UNDER]) == 0
    figures = json.loads(capsys.readouterr().out)
    model, tokenizer = models.load("retriever")
    tokens = tokenizer.encode(PROMPT)
    steps = list(models.stream(model, [tokens], policy="h2o+caote", budget=16, block=16, max_new_tokens=4))
    assert figures["tokens"] == [int(token[0]) for token, _ in steps]
    assert out.strip() == figures["text"].strip() == tokenizer.decode(figures["tokens"]).strip()
    assert (figures["prompt_tokens"], figures["cache_bytes"]) == (len(tokens), steps[-1][1].nbytes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The embedded model with an untrained predictor inside its folder, and without one."""
    with_one, without = (tmp_path_factory.mktemp("models") / name for name in ("with", "without"))
    ignored = shutil.ignore_patterns("butler")
    for folder in (with_one, without):
        shutil.copytree(Path(models.__file__).parent / "retriever", folder, ignore=ignored)
    model, _ = models.load("retriever")
    models.save_network(with_one / "butler", reference.butler(model.config), model, "retriever")
    return str(with_one), str(without)


def test_a_selection_says_what_it_read(folders, capsys):
    command = ["--prompt", PROMPT, "--select", "butler", "--budget", "0.25", "--sinks", "2", "--json", *SMALL]
    assert generate.main([folders[0], *command]) == 0
    figures = json.loads(capsys.readouterr().out)
    model, tokenizer = models.load(folders[0])
    tokens = tokenizer.encode(PROMPT)
    butler = models.own_network(folders[0], model)
    assert figures["tokens"] == streamed(model, tokens, select="butler", networks=butler, budget=0.25, sinks=2)
    assert (figures["select"], figures["budget"]) == ("butler", 0.25)
    steps = range(len(tokens) + 1, len(tokens) + len(figures["tokens"]))
    assert figures["read_share"] == pytest.approx(sum(-(-count // 4) + 2 for count in steps) / sum(steps))
    assert generate.main([folders[1], "--networks", f"{folders[0]}/butler", *command]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == figures["tokens"]


@pytest.fixture
def told(monkeypatch):
    """What the command hands to `models.stream`, in whose place two tokens come at once."""
    given = {}

    def stream(model, tokens, *, on_block, **settings):
        given.update(settings, tokens=tokens)
        on_block(len(tokens[0]), len(tokens[0]), types.SimpleNamespace(nbytes=0))
        return iter([(np.array([token]), types.SimpleNamespace(nbytes=2**20)) for token in (5, 6)])

    monkeypatch.setattr(models, "stream", stream)
    return given


@pytest.mark.parametrize(("policy", "given"), [("butler+caote", ["butler"]), ("h2o+caote", [])])
def test_a_policy_gets_the_predictor_that_it_scores_by(policy, given, folders, told):
    assert generate.main([folders[0], "--prompt", PROMPT, "--policy", policy, "--budget", "16", *SMALL]) == 0
    assert [network.name for network in told["networks"]] == given


@pytest.mark.parametrize(
    ("policy", "flags", "moments"),
    [
        ("snapkv(window=8)", [], ("block", 8)),
        ("snapkv(window=8)", ["--evict-every", "3", "--when", "prompt"], ("prompt", 3)),
        ("snapkv(window=8)", ["--when", "published"], ("prompt", 0)),
    ],
)
def test_json_says_when_evictions_are(policy, flags, moments, told, capsys):
    command = ["retriever", "--prompt", PROMPT, "--policy", policy, "--budget", "16", "--json", *SMALL]
    assert generate.main([*command, *flags]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["when"], figures["evict_every"]) == moments
    asked = dict(zip(flags[::2], flags[1::2], strict=True))
    assert told["when"] == asked.get("--when", "block")
    assert told["evict_every"] == (int(asked["--evict-every"]) if "--evict-every" in asked else None)


def test_flags_reach_the_stream(told):
    flags = "--temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 --cache-dtype int8"
    flags += " --question what? --block 16 --max-new-tokens 4"
    assert generate.main(["retriever", "--prompt", PROMPT, *flags.split()]) == 0
    expected = dict(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    expected |= dict(cache_dtype="int8", block=16, max_new_tokens=4)
    assert {name: told[name] for name in expected} == expected
    assert told["question"] == len(models.load("retriever")[1].encode("what?", add_special_tokens=False))


THREE = [
    {"prompt": PROMPT},
    {"prompt": "It was a quiet day. " * 9, "question": "What was the day like?", "policy": "tova", "budget": 0.5},
    {"prompt": PROMPT, "policy": "full"},
]


def prompts(tmp_path, lines):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(file)


@pytest.mark.matrix
def test_each_of_many_prompts_gives_what_it_gives_alone(tmp_path, capsys):
    assert generate.main(["retriever", "--prompts", prompts(tmp_path, [THREE[0], "", *THREE[1:]]), *UNDER]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    said = [json.loads(line) for line in out.splitlines()]
    assert [one.pop("line") for one in said] == [1, 3, 4]
    own = ["--policy", "tova", "--budget", "0.5", *SMALL]
    alone = [
        ["--prompt", PROMPT, *UNDER],
        ["--prompt", THREE[1]["prompt"], "--question", THREE[1]["question"], *own],
        ["--prompt", PROMPT, *SMALL],
    ]
    for one, flags in zip(said, alone, strict=True):
        assert generate.main(["retriever", *flags, "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures.keys() == one.keys()
        told = ("policy", "budget", "when", "evict_every", "text", "tokens", "prompt_tokens", "fingerprints")
        assert {name: one[name] for name in told} == {name: figures[name] for name in told}


def test_a_prompt_that_fails_leaves_the_others_alone(tmp_path, capsys):
    long = {"prompt": "calm " * 5000, "policy": "full"}
    assert generate.main(["retriever", "--prompts", prompts(tmp_path, [long, THREE[0]]), *UNDER]) == 2
    out, err = capsys.readouterr()
    failed, done = map(json.loads, out.splitlines())
    assert failed.keys() == {"line", "error"} and "positions" in failed["error"]
    assert done["line"] == 2 and done["new_tokens"] == 4
    assert err.count("\n") == 1 and "1 of 2 prompts failed" in err


def test_many_prompts_stand_in_the_chat_template(folders, tmp_path, capsys):
    folder = shutil.copytree(folders[1], tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}Question: {{ m.content }}{% endfor %} Answer:")
    assert generate.main([str(folder), "--chat", "--prompts", prompts(tmp_path, [{"prompt": "what?"}]), *UNDER]) == 0
    _, tokenizer = models.load("retriever")
    tokens = tokenizer.encode("Question: what? Answer:", add_special_tokens=False)
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(("given", "said"), [("name=Ann", "Ann asks: what?"), ('name="4"', "4 asks: what?")])
def test_a_chat_template_gets_values_from_the_command_line(given, said, folders, tmp_path, capsys):
    folder = shutil.copytree(folders[1], tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ name }} asks: {{ messages[0].content }}")
    asked = ["--prompts", prompts(tmp_path, [{"prompt": "what?"}]), *UNDER, "--template", given]
    assert generate.main([str(folder), "--chat", *asked]) == 0
    _, tokenizer = models.load("retriever")
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == len(tokenizer.encode(said, add_special_tokens=False))
    assert generate.main([str(folder), *asked]) == 2
    assert "--template is for prompts in the chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("[1]", "no JSON object"),
        ({"prompt": 3}, "prompt is a JSON int; expected text"),
        ({"prompt": "x", "budgets": 3}, "unknown field 'budgets'; expected one of prompt, question, policy, budget"),
        ({"prompt": "x", "budget": True}, "budget is a JSON bool; expected a number"),
        ({"prompt": "x", "policy": "snapkv(window=99)", "budget": 512}, "block has 16"),
    ],
)
def test_a_bad_line_is_named_before_the_weights_are_read(line, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(models, "load", None)
    assert generate.main(["retriever", "--prompts", prompts(tmp_path, [THREE[0], line]), *UNDER]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert re.search(rf"line 2 of \S+prompts.jsonl: .*{sentence}", err), err


@pytest.mark.parametrize("command", [generate, chat])
def test_each_flag_says_its_default(command):
    options = [action for action in command.parser()._actions if action.option_strings]
    silent = [action.option_strings[-1] for action in options if "(default" not in (action.help or "")]
    assert silent == ["--help", "--version"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", ["ask", "generate"])
def test_the_module_runs_and_the_function_keeps_its_name(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(f"models.{name}", run_name="__main__")
    assert "--policy" in capsys.readouterr().out
    with pytest.raises(ImportError, match=f"models.{name} is a function and a command: `import models`, or run"):
        importlib.import_module(f"models.{name}")
    assert isinstance(getattr(models, name), types.FunctionType)


def fed(monkeypatch, tokenizer, *flags: str) -> tuple[list[int], int]:
    """Return what the command feeds: the tokens, and how many of them are the question."""
    seen = []

    def stream(model, tokens, **settings):
        seen.append((tokens[0], settings["question"]))
        raise ValueError("that is all")

    model = reference.decoder(models.Config(300, 16, 16, 1, 1, 1))
    monkeypatch.setattr(models, "load", lambda *_, **__: (model, tokenizer))
    monkeypatch.setattr(models, "stream", stream)
    assert generate.main(["retriever", *flags, *SMALL]) == 2
    (one,) = seen
    return one


def test_a_question_goes_on_where_the_prompt_ends(monkeypatch):
    tokenizer = spaced(None)
    found = fed(monkeypatch, tokenizer, "--prompt", "It costs $", "--question", "12?")
    assert found == (tokenizer.encode("It costs $12?"), 3)


def test_a_question_in_a_chat_template_is_part_of_the_message(monkeypatch):
    tokenizer = tokenizer_of(CHATML)
    tokens, question = fed(monkeypatch, tokenizer, "--chat", "--prompt", PROMPT, "--question", "Who?")
    whole = tokenizer.chat([{"role": "user", "content": f"{PROMPT.strip()}\n\nWho?"}])
    assert tokenizer.decode(tokens) == tokenizer.decode(tokenizer.encode(whole, add_special_tokens=False))
    assert tokenizer.decode(tokens[-question:]).startswith("\n\nWho?")
