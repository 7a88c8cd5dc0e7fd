"""The page of what was forgotten: traces against the cache itself, and the page in a browser."""

import base64
import math
import re
from pathlib import Path

import numpy as np
import pytest

import models
from evals import command_line, tasks, view
from evals.__main__ import main
from tests.evals import browser
from tests.models import reference
from tests.models.commands.test_chat import spaced
from tests.tiers import matrix


@pytest.fixture(scope="module")
def prompt(retriever):
    return tasks.needle(3, retriever[1], 150, 0.5, facts=2).tokens


def decoded(found):
    read = lambda name: np.frombuffer(base64.b64decode(found[name]), "<u2")  # noqa: E731
    return read("entered"), read("left").reshape(found["layers"], found["heads"], -1)


@matrix
def test_a_trace_says_what_the_cache_held_after_each_block(retriever, prompt):
    (model, tokenizer), policy = retriever, "tova"
    found = view.trace(model, tokenizer, prompt, models.Options(policy=policy, budget=40, block=32, max_new_tokens=3))
    entered, left = decoded(found)
    n = len(prompt)
    ends = list(range(n - 32 * (math.ceil(n / 32) - 1), n + 1, 32))
    assert [step["fed"] for step in found["steps"]] == [*ends, n + 1, n + 2]
    assert (entered[:n] <= len(ends) - 1).all() and entered[n + 2] == view.NEVER
    for step in (1, len(ends) - 1):
        cache = models.prefill(model, np.array([prompt[: ends[step]]]), policy=policy, budget=40, block=32).cache
        held = view.held_tokens(cache, n)
        assert held.sum(axis=-1).tolist() == np.asarray(cache.num_live)[:, 0].tolist()
        assert (((entered <= step) & (left > step))[..., :n] == held).all()
    out = models.generate(model, [prompt], policy=policy, budget=40, block=32, max_new_tokens=3)
    assert found["answer"] == tokenizer.decode(out.tokens[0].tolist())
    assert found["steps"][-1]["label"] == "answer, step 2"


def test_pieces_are_the_text(retriever, prompt):
    tokenizer = retriever[1]
    assert "".join(view.pieces(tokenizer, prompt)) == tokenizer.decode(prompt, skip_special_tokens=False)


def test_a_question_goes_on_where_the_prompt_ends(tmp_path, monkeypatch):
    tokenizer, seen = spaced(None), []

    def stream(model, tokens, *, options, question):
        seen.append((tokens[0].tolist(), question))
        raise ValueError("that is all")

    loaded = reference.decoder(models.Config(300, 16, 16, 1, 1, 1)), tokenizer
    monkeypatch.setattr(command_line, "load", lambda flags: loaded)
    monkeypatch.setattr(models, "stream", stream)
    (tmp_path / "book.txt").write_text("It rained.")
    line = f"view --prompt-file {tmp_path}/book.txt --question Why? --policies full --html {tmp_path}/view.html"
    assert main(line.split()) == 2
    assert seen == [(tokenizer.encode("It rained.\nWhy?"), 5)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("view") / "view.html"
    line = "view --policies full,tova,recency --budget 40 --block 64 --length 160 --max-new-tokens 3"
    assert main([*line.split(), "--html", str(path)]) == 0
    return path


@matrix
@browser.needed
def test_the_page_shades_tokens_for_two_policies_and_fits_a_phone(written):
    script = "document.title = document.documentElement.scrollWidth <= window.innerWidth ? 'fits' : 'too wide';"
    found = browser.dump(written, script=script)
    assert "<title>fits</title>" in found
    assert found.count("<section>") == 2
    assert "40 of 1" in found and 'class="lost"' in found and "color-mix" in found
    assert re.search(r'id="where">after \d of \d+: block, tokens \d+ to \d+', found)
    assert found.count("</strong> (the right answer") == 2


@matrix
@browser.needed
def test_slider_layer_head_and_policy_change_what_is_shown(written):
    script = Path(__file__).with_name("notes.js").read_text()
    notes = browser.dump(written, script=script).split('id="notes">')[1].split("</pre>")[0].split("\n")
    full, recent = notes[0].split("|")
    total = int(re.search(r"of (\d+) tokens", full)[1])
    assert full == f"{total} of {total} tokens per head; 0 forgotten by all"
    assert recent == f"40 of {total} tokens per head; {total - 40} forgotten by all"
    assert "of 160" not in notes[1] and int(re.search(r"of (\d+)", notes[1])[1]) <= 64
    assert notes[2].startswith(f"{total + 2} of {total + 2} tokens per head")
    assert "Token 1 (layer.head): 3.2" in notes[3] and "Token 1 (layer.head): no head" in notes[3]
