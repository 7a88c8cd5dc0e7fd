"""`python -m models.generate` as a user types it, on the embedded model."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from flax import nnx

import models
from models import cli

PROMPT = "The code of amber falcon is 4719. It was a quiet day. Question: what is the code of amber falcon? Answer:"
SMALL = ["--block", "16", "--max-new-tokens", "4"]


def test_text_comes_out_with_figures_behind_it(capsys):
    assert cli.main(["retriever", "--prompt", PROMPT, "--policy", "h2o+caote", "--budget", "16", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "tokens in" in err
    assert "cache" in err


def test_json_is_one_object_with_the_same_tokens_as_generate(capsys):
    assert cli.main(["retriever", "--prompt", PROMPT, "--policy", "h2o+caote", "--budget", "16", "--json", *SMALL]) == 0
    figures = json.loads(capsys.readouterr().out)
    model, tokenizer = models.load("retriever")
    tokens = tokenizer.encode(PROMPT)
    out = models.generate(model, [tokens], policy="h2o+caote", budget=16, block=16, max_new_tokens=4)
    assert figures["tokens"] == out.tokens[0, : out.lengths[0]].tolist()
    assert figures["text"] == tokenizer.decode(figures["tokens"])
    assert figures["prompt_tokens"] == len(tokens)
    assert figures["cache_bytes"] == out.cache.nbytes


def test_two_devices_say_what_one_says(capsys):
    command = ["retriever", "--prompt", PROMPT, "--policy", "h2o+caote", "--budget", "16", "--json", *SMALL]
    assert cli.main(command) == cli.main([*command, "--mesh", "data=1,tensor=2"]) == 0
    one, two = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["tokens"] == two["tokens"]


def test_a_prompt_file_is_read(tmp_path, capsys):
    file = tmp_path / "book.txt"
    file.write_text(PROMPT)
    assert cli.main(["retriever", "--prompt-file", str(file), "--json", *SMALL]) == 0
    from_file = json.loads(capsys.readouterr().out)["tokens"]
    assert cli.main(["retriever", "--prompt", PROMPT, "--json", *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == from_file


def test_a_prompt_may_come_out_of_a_pipe(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(PROMPT,))
    writer.start()
    assert cli.main(["retriever", "--prompt-file", str(pipe), "--json", *SMALL]) == 0
    writer.join()
    from_pipe = json.loads(capsys.readouterr().out)["tokens"]
    assert cli.main(["retriever", "--prompt", PROMPT, "--json", *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == from_pipe


def test_a_question_comes_after_the_context_was_compressed_on_pages(capsys):
    context, question = "It was a quiet day. " * 20, "What was the day like?"
    flags = ["--policy", "laprox(window=8)@model", "--budget", "24", "--when", "prompt", "--json", *SMALL]
    assert cli.main(["retriever", "--prompt", context, "--question", question, *flags]) == 0
    figures = json.loads(capsys.readouterr().out)
    model, tokenizer = models.load("retriever")
    asked = tokenizer.encode(question, add_special_tokens=False)
    out = models.generate(
        model, [[*tokenizer.encode(context), *asked]], question=len(asked), policy="laprox(window=8)@model", budget=24,
        block=16, when="prompt", max_new_tokens=4,
    )  # fmt: skip
    assert figures["tokens"] == out.tokens[0, : out.lengths[0]].tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The embedded model with an untrained predictor inside its folder, and without one."""
    with_one, without = (tmp_path_factory.mktemp("models") / name for name in ("with", "without"))
    ignored = shutil.ignore_patterns("butler")
    for folder in (with_one, without):
        shutil.copytree(Path(models.__file__).parent / "retriever", folder, ignore=ignored)
    model, _ = models.load("retriever")
    butler = models.Butler(models.ButlerConfig.of(model.config), rngs=nnx.Rngs(0))
    models.save_butler(with_one / "butler", butler, model, "retriever")
    return str(with_one), str(without)


def test_a_selection_says_what_it_read(folders, capsys):
    command = ["--prompt", PROMPT, "--select", "butler", "--budget", "0.25", "--sinks", "2", "--json", *SMALL]
    assert cli.main([folders[0], *command]) == 0
    figures = json.loads(capsys.readouterr().out)
    model, tokenizer = models.load(folders[0])
    tokens = tokenizer.encode(PROMPT)
    out = models.generate(
        model, [tokens], select="butler", butler=models.own_butler(folders[0], model), budget=0.25, sinks=2, block=16,
        max_new_tokens=4,
    )  # fmt: skip
    assert figures["tokens"] == out.tokens[0, : out.lengths[0]].tolist()
    assert (figures["select"], figures["budget"]) == ("butler", 0.25)
    steps = range(len(tokens) + 1, len(tokens) + len(figures["tokens"]))
    assert figures["read_share"] == pytest.approx(sum(-(-count // 4) + 2 for count in steps) / sum(steps))
    assert cli.main([folders[1], "--butler", f"{folders[0]}/butler", *command]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == figures["tokens"]


def test_the_summary_names_the_selection(capsys):
    assert cli.main(["retriever", "--prompt", PROMPT, "--select", "quest", "--budget", "8", *SMALL]) == 0
    assert re.search(r"quest, budget 8, reads at most \d+\.\d% of the tokens", capsys.readouterr().err)


def test_a_policy_scores_by_the_predictor(folders, capsys):
    command = ["--prompt", PROMPT, "--policy", "butler", "--budget", "16", "--json", *SMALL]
    assert cli.main([folders[0], *command]) == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] > 0


@pytest.mark.parametrize("flags", [["--select", "butler"], ["--policy", "butler+caote"]])
def test_a_model_without_a_predictor_says_how_to_get_one(folders, flags, capsys):
    assert cli.main([folders[1], "--prompt", PROMPT, "--budget", "16", *flags]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert re.search(r"has no predictor .* python -m train.butler, .*--butler", err), err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--select", "oracle"], "select='oracle' needs a budget"),
        (["--select", "oracle", "--budget", "90000"], "budget of 90000 tokens a step is more than"),
        (["--select", "oracel", "--budget", "8"], "unknown source 'oracel'"),
        (["--select", "quest(page_size=0)", "--budget", "8"], "page_size is 0"),
        (["--select", "oracle", "--budget", "8", "--policy", "h2o"], "both policy='h2o' and select='oracle'"),
        (["--select", "oracle", "--budget", "8", "--sinks", "-1"], "sinks is -1"),
        (["--select", "butler", "--butler", "no/such/folder", "--budget", "8"], "no/such/folder has no butler.json"),
        (["--policy", "h2o+coate", "--budget", "64"], "unknown policy 'coate'"),
        (["--policy", "h2o@modle", "--budget", "64"], "unknown allocation 'modle'"),
        (["--policy", "key_norm@model", "--budget", "64"], "put 'normalise' between"),
        (["--policy", "snapkv", "--budget", "64", "--block", "16"], r"a smaller window \(window=16 in its name\)"),
        (["--policy", "snapkv@layer", "--budget", "8"], "always keeps 0 first and 32 last"),
        (["--policy", "h2o+(", "--budget", "64"], "is malformed"),
        (["--policy", "snapkv", "--budget", "16"], "always keeps 0 first and 32 last"),
        (["--policy", "h2o", "--budget", "1.5"], "neither slots per head"),
        (["--policy", "h2o"], "needs a budget"),
        (["--budget", "64"], "without a policy"),
        (["--policy", "h2o", "--budget", "64", "--block", "0"], "block is 0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--max-new-tokens", "100000"], "positions"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--top-p", "2"], "top_p is 2"),
        (["--dtype", "float8"], "float8"),
        (["--mesh", "data=2,tensor=3"], "tensor=3|devices"),
        (["--mesh", "rows=2"], "rows"),
        (["--mesh", "data=2,tensor=2"], "data=2 does not divide the batch of 1"),
    ],
)
def test_bad_flags_end_in_one_sentence(flags, sentence, capsys):
    assert cli.main(["retriever", "--prompt", PROMPT, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(sentence, err), err


def test_an_empty_prompt_is_refused(capsys):
    assert cli.main(["retriever", "--prompt", "  "]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_a_missing_prompt_file_is_named(tmp_path, capsys):
    assert cli.main(["retriever", "--prompt-file", str(tmp_path / "none.txt")]) == 2
    assert "there is no prompt file" in capsys.readouterr().err


def test_a_prompt_that_is_not_text_is_refused(tmp_path, capsys):
    file = tmp_path / "picture.png"
    file.write_bytes(b"\x89PNG\xff\xfe")
    assert cli.main(["retriever", "--prompt-file", str(file)]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_the_module_runs_and_the_function_keeps_its_name():
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "models.generate", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--policy" in done.stdout
    assert callable(models.generate)
