"""`models.ask`: the document is read once, and each question answered as if it were the only one."""

import dataclasses
import io
import itertools
import json
import sys
import warnings

import jax
import numpy as np
import pytest

import kvjax
import models
from models import asking
from models.asking import Form
from models.commands import ask
from models.config import Rope
from models.states import without_room
from tests.models import reference
from tests.models.commands.test_chat import CHATML, CONFIG, LLAMA, SYSTEM_LAST, WITHOUT_THOUGHTS, spaced, tokenizer_of
from tests.models.tiny import held, run
from tests.tiers import first, matrix, nightly

DOCUMENT, QUESTIONS = "The river was calm. " * 6, ["Who?", "Where was it?"]
SETTINGS = dict(block=16, max_new_tokens=9)


@pytest.mark.parametrize("policy", first(1, ["snapkv(window=4)+caote", "h2o@adakv"], rest=nightly))  # one is paged
def test_each_answer_is_that_of_the_whole_prompt(model, tmp_path, policy):
    tokenizer, made = tokenizer_of(CHATML), dict(policy=policy, budget=48)
    found = models.ask(model, tokenizer, DOCUMENT, QUESTIONS, **made, **SETTINGS)
    assert found.cache_bytes == found.cache.nbytes < found.full_cache_bytes
    assert found.cache_bytes < found.peak_cache_bytes
    for question, answer in zip(QUESTIONS, found.answers, strict=True):
        whole = tokenizer.chat([{"role": "user", "content": f"{DOCUMENT.strip()}\n\n{question}"}])
        head, tail = whole.split(DOCUMENT.strip())
        parts = [tokenizer.encode(text, add_special_tokens=False) for text in (head + DOCUMENT.strip(), tail)]
        assert found.document_tokens == len(parts[0])
        settings = dict(question=len(parts[1]), evict_every=0, block=16, new_tokens=9, end=CONFIG.eos, **made)
        expected = run(parts[0] + parts[1], CONFIG, **settings).tokens
        assert answer == tokenizer.decode([token for token in expected if token not in CONFIG.eos])
    (file := tmp_path / "document.txt").write_text(DOCUMENT)
    of_file = models.ask(model, tokenizer, file, QUESTIONS[1], **made, **SETTINGS)
    assert of_file.answers == found.answers[1:]
    again = models.ask(model, tokenizer, found.cache, QUESTIONS[1], **SETTINGS)
    assert again.answers == found.answers[1:] and (again.seconds, again.cache_bytes) == (0, found.cache_bytes)
    said: list[str] = []
    at_once = models.ask(
        model, tokenizer, found.cache, QUESTIONS, batch=2, watch=models.Watch(on_text=said.append), **SETTINGS
    )
    assert at_once.answers == found.answers == said and at_once.repeated == found.repeated
    assert at_once.peak_cache_bytes > 5 * found.cache_bytes  # what is kept, its copies, and where they grow


def test_a_repetition_penalty_counts_the_document_too(model):
    tokenizer, made = tokenizer_of(CHATML), SETTINGS | dict(repetition_penalty=1.7)
    found = models.ask(model, tokenizer, DOCUMENT, QUESTIONS[:1], policy="full", **made)
    text = tokenizer.chat([{"role": "user", "content": f"{DOCUMENT.strip()}\n\n{QUESTIONS[0]}"}])
    fed = tokenizer.encode(text, add_special_tokens=False)
    (tokens,) = models.generate(model, [fed], **made).tokens.tolist()
    assert found.answers == [tokenizer.decode(itertools.takewhile(lambda token: token not in CONFIG.eos, tokens))]
    seen = np.isin(np.arange(CONFIG.vocab_size), fed[: found.document_tokens])[None]
    again = models.ask(model, tokenizer, found.cache, QUESTIONS[:1], key=models.Draws(seen=seen), **made)
    assert again.answers == found.answers
    with pytest.raises(ValueError, match="reads what the cache has seen"):
        models.ask(model, tokenizer, found.cache, QUESTIONS[:1], **made)


def test_the_peak_is_of_the_document_read_or_of_an_answer_beside_what_is_kept(model, monkeypatch):
    whole, sizes = models.stream, []

    def stream(*given, cache=None, on_block=None, **settings):
        kept = 0 if cache is None else cache.nbytes

        def note(*block):
            sizes.append(block[2].nbytes)
            on_block(*block)

        for token, grown in whole(*given, cache=cache, on_block=None if on_block is None else note, **settings):
            sizes.append(kept + grown.nbytes)
            yield token, grown

    monkeypatch.setattr(models, "stream", stream)
    tokenizer, made = tokenizer_of(CHATML), dict(policy="snapkv(window=4)+caote", budget=48)
    document = models.ask(model, tokenizer, DOCUMENT, [], when="prompt", **made, **SETTINGS)
    assert document.peak_cache_bytes == max(sizes) > document.cache_bytes
    sizes.clear()
    found = models.ask(model, tokenizer, document.cache, QUESTIONS, **SETTINGS)
    assert found.peak_cache_bytes == max(sizes) > 2 * document.cache_bytes


def test_equal_questions_draw_answers_of_their_own_and_one_key_the_same_ones(model):
    tokenizer, made = tokenizer_of(CHATML), dict(policy="snapkv(window=4)+caote", budget=48)
    cache = models.ask(model, tokenizer, DOCUMENT, [], **made, **SETTINGS).cache
    hot = dict(key=jax.random.key(0), temperature=1e6, end=(), **SETTINGS)
    one, same = (models.ask(model, tokenizer, cache, QUESTIONS[:1] * 2, **hot).answers for _ in range(2))
    assert one == same and one[0] != one[1]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, ("repeat", 0.25)),
        (dict(policy="auto", budget=40), ("repeat", 40)),
        (dict(options=models.Options(budget=0.5)), ("repeat", 0.5)),
        (dict(options=models.Options("full")), (None, None)),
        (dict(networks=reference.scorer(CONFIG)), ("gate", 0.25)),
    ],
)
def test_a_policy_that_is_not_named_is_that_of_a_gate_if_there_is_one(model, monkeypatch, given, kept):
    read = []

    def stream(model, tokens, *, options, **settings):
        read.append((options.policy and options.policy.name, options.budget))
        raise EOFError

    monkeypatch.setattr(models, "stream", stream)
    with pytest.raises(EOFError):
        models.ask(model, tokenizer_of(CHATML), DOCUMENT, QUESTIONS, **given)
    assert read == [kept]


def test_a_gate_in_the_model_s_folder_or_one_that_ships_for_it_is_taken(model, monkeypatch, tmp_path):
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "gate.json").write_text("{}")
    assert asking.automatic(model, None, "window", path=tmp_path) == "gate"
    assert asking.automatic(model, None, "window", path=tmp_path / "gate") == "window"
    monkeypatch.setattr(asking, "shipped", lambda model, name: tmp_path if name == "gate" else None)
    assert asking.automatic(model, None, "repeat") == "gate"


@pytest.mark.parametrize("given", [{}, dict(budget=0.25)])  # what the command gives by default
def test_a_document_of_two_tokens_keeps_what_the_default_policy_protects(model, given):
    tokenizer = tokenizer_of(None)
    text = tokenizer.decode(tokenizer.encode(DOCUMENT)[:2])
    found = models.ask(model, tokenizer, text, [], block=16, **given)
    assert found.document_tokens == len(tokenizer.encode(text)) <= 12 and found.policy == "repeat"
    assert (found.cache.num_live == found.document_tokens).all()


@pytest.mark.parametrize(
    ("changes", "policy", "message"),
    [
        (dict(max_positions=80), "full", "the model has 80 positions"),
        (dict(rope=Rope(type="dynamic", factor=2.0, original_positions=70)), "tova", "texts beyond 70 tokens"),
    ],
)
def test_a_document_that_no_question_fits_behind_is_not_read(model, monkeypatch, changes, policy, message):
    tokenizer = tokenizer_of(CHATML)
    other = models.Decoder(dataclasses.replace(model.config, **changes), model.arrays())
    monkeypatch.setattr(models, "stream", lambda *_, **__: pytest.fail("the document was read"))
    with pytest.raises(ValueError, match=message):
        models.ask(other, tokenizer, DOCUMENT * 3, QUESTIONS, policy=policy, budget=None if policy == "full" else 48)


@pytest.mark.filterwarnings("ignore")
def test_a_share_of_a_short_document_is_what_the_run_takes_for_it(model):
    """0.07 of 100 tokens is 7.000000000000001 as a product, and 7 tokens are less than the policy protects."""
    options = dataclasses.replace(asking.OPTIONS, policy="tova+protect(sinks=4,recent=4)", budget=0.07)
    assert asking._as_read(model, options, tokenizer_of(CHATML), 100).budget == 8


@pytest.mark.parametrize("made", [tokenizer_of, spaced])
@pytest.mark.parametrize(
    ("template", "system"),
    [(None, None), *itertools.product([CHATML, LLAMA, SYSTEM_LAST, WITHOUT_THOUGHTS], [None, "Be kind."])],
)
def test_document_and_question_are_the_text_of_the_template(template, system, made):
    tokenizer = made(template)
    form = Form.of(tokenizer, system)
    tokens = form.document(" A text.\n") + form.question("Why? ")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": "A text.\n\nWhy?"})
    whole = "A text.\n\nWhy?" if template is None else tokenizer.chat(messages)
    assert tokens == tokenizer.encode(whole, add_special_tokens=False)


def test_a_command_asks_a_file_and_what_it_saved(tmp_path, capsys, monkeypatch):
    text, kept = tmp_path / "text.txt", tmp_path / "text.cache"
    text.write_text("The code of amber falcon is 4719. The river was calm. The code of silver anchor is 0382.")
    asked = [
        f"Question: what is the code of {x}? Answer: the code of {x} is" for x in ("amber falcon", "silver anchor")
    ]
    made = ["--max-new-tokens", "4", "--repetition-penalty", "1.01"]  # which counts the document's tokens
    flags = ["--policy", "keydiff", "--budget", "24", "--block", "16", *made]
    read = ["retriever", "--document", str(text), "--save", str(kept), *flags]
    assert ask.main([*read, "--question", asked[0], "--question", asked[1]]) == 0
    out, err = capsys.readouterr()
    assert out.split() == ["4719", "0382"]
    assert "retriever · keydiff, keeps 24 tokens per head" in err and "2 answers in" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{asked[1]}\n\n{asked[0]}\n"))
    assert ask.main(["retriever", "--load", str(kept), "--json", "--batch", "2", *made]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [record["answer"].strip() for record in figures["answers"]] == ["0382", "4719"] and figures["when"] is None
    assert ask.main(["retriever", "--load", str(kept), "--budget", "0.5", "--question", "Who?"]) == 2
    assert "argument --budget: not allowed with argument --load" in capsys.readouterr().err
    info = kvjax.cache_info(kept)
    assert (figures["policy"], figures["budget"], figures["document_tokens"]) == ("keydiff", 24, info["tokens"][0])
    assert {name: figures[name] for name in ("cache_bytes", "full_cache_bytes")} == {
        name: info[name] for name in ("cache_bytes", "full_cache_bytes")
    }


def test_free_pages_are_taken_away_and_tokens_stay():
    def layers():  # in one program
        cache = kvjax.PagedCache.init(batch=1, kv_heads=2, pages=12, page_size=2, most=8, head_dim=2)
        cache = kvjax.insert(cache, rows, rows)
        small = kvjax._src.paged.trimmed(cache, 7)
        return small, small.layer(), cache.layer()

    rows = np.arange(24.0).reshape(1, 6, 2, 2)
    small, after, before = jax.jit(layers)()
    assert (int(small.num_free), small.free.tolist()[0], len(small.owner)) == (1, 6, 7)
    assert np.array_equal(after.key, before.key)


def test_free_slots_are_taken_away_but_those_that_the_fullest_head_needs():
    layer = kvjax.KVCache.init(batch=2, kv_heads=1, slots=40, head_dim=2)
    position = np.where(np.arange(40) < np.array([3, 11])[:, None, None], np.arange(40), -1)
    layer = dataclasses.replace(layer, position=jax.numpy.asarray(position))
    small = without_room(kvjax.LayerCaches((layer,)))
    assert small.num_slots == 11 and [len(head) for head in held(small)[0]] == [3, 11]


def test_questions_of_other_lengths_ask_for_no_program(model, compiled_steps):
    tokenizer = tokenizer_of(CHATML)
    made = dict(policy="snapkv(window=4)+caote", budget=48)
    cache = models.ask(model, tokenizer, DOCUMENT, [], **made, **SETTINGS).cache
    settings, words = SETTINGS | dict(block=64), "Who went to the river when it was calm ?".split()
    models.ask(model, tokenizer, cache, [words[0], " ".join(words)], **settings)  # of at most 32, and of more
    lengths = {len(Form.of(tokenizer, None).question(" ".join(words[:n]))) for n in range(1, len(words))}
    assert len(lengths) > 4 and max(lengths) <= 64, lengths
    before = compiled_steps()
    for n in range(1, len(words)):
        models.ask(model, tokenizer, cache, " ".join(words[:n]), **settings)
    assert compiled_steps() == before


@matrix
def test_an_answer_that_repeats_itself_is_ended(model, monkeypatch):
    class Third(list):
        def add(self, token):
            self.append(token)
            return len(self) == 3

    monkeypatch.setattr(asking, "Repetition", Third)
    tokenizer, made = tokenizer_of(CHATML), dict(policy="full", end=(), **SETTINGS)
    found = models.ask(model, tokenizer, DOCUMENT, QUESTIONS[0], **made)
    whole = models.ask(model, tokenizer, DOCUMENT, QUESTIONS[0], watch=models.Watch(may_repeat=True), **made)
    assert (found.repeated, whole.repeated) == ((True,), (False,))
    assert len(found.answers[0]) < len(whole.answers[0]) and whole.answers[0].startswith(found.answers[0])


@matrix
@pytest.mark.filterwarnings("default")
def test_what_keeps_too_little_or_takes_too_much_is_warned_of(model, monkeypatch):
    monkeypatch.setattr(asking, "UNNOTICED", 0)
    tokenizer, made = tokenizer_of(CHATML), dict(policy="keydiff", max_new_tokens=2, block=16)
    for document, budget in ((DOCUMENT, 0.1), (DOCUMENT * 4, 16)):
        with pytest.warns(UserWarning, match=f"a budget of {budget} keeps at most a tenth of this document's"):
            models.ask(model, tokenizer, document, [], budget=budget, **made)
    with pytest.warns(UserWarning, match="more memory at once than one of all tokens"):
        models.ask(model, tokenizer, DOCUMENT * 4, QUESTIONS, budget=0.9, **made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.ask(model, tokenizer, DOCUMENT * 4, QUESTIONS, budget=0.25, **made)
        models.ask(model, tokenizer, DOCUMENT, QUESTIONS, policy="full", max_new_tokens=2, block=16)
        asking._as_read(model, dataclasses.replace(asking.OPTIONS, policy="gate", budget=0.1), tokenizer, 1_000)
