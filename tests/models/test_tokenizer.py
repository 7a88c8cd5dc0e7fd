"""Text to ids and back, whole and streamed, and chats: as transformers does it (golden files: make_golden.py)."""

import json
import shutil
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from models.tokenizer import Tokenizer
from tests.models.make_golden import GOLDEN

NAMES = ("tokenizer", "tokenizer_byte_fallback")
LOADED = {name: Tokenizer.from_folder(GOLDEN / name) for name in NAMES}
EXPECTED = {name: json.loads((GOLDEN / name / "expected.json").read_text()) for name in NAMES}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

TEXT = st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT), max_size=30)


def streamed(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    return [*(stream.add(token) for token in ids), stream.finish()]


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def folder(name, tmp_path):
    return shutil.copytree(GOLDEN / name, tmp_path / "model")


def with_template(template):
    tokenizer = LOADED["tokenizer"]
    return Tokenizer(tokenizer.backend, tokenizer.special_tokens, template)


def test_ids_and_texts_are_those_of_transformers(name):
    tokenizer, expected = LOADED[name], EXPECTED[name]
    assert [tokenizer.encode(text) for text in expected["texts"]] == expected["ids"]
    assert [tokenizer.encode(text, add_special_tokens=False) for text in expected["texts"]] == expected["plain_ids"]
    assert [tokenizer.decode(ids) for ids in expected["ids"]] == expected["decoded"]
    with_special = [tokenizer.decode(ids, skip_special_tokens=False) for ids in expected["ids"]]
    assert with_special == expected["decoded_with_special"]
    assert [tokenizer.bos, tokenizer.eos, tokenizer.pad] == expected["special_ids"]
    assert tokenizer.vocab_size == expected["vocab_size"]


@pytest.mark.parametrize("prompt", [False, True])
def test_chats_are_those_of_transformers(name, prompt):
    texts = [LOADED[name].chat(chat, add_generation_prompt=prompt) for chat in EXPECTED[name]["chats"]]
    assert texts == [pair[prompt] for pair in EXPECTED[name]["chat_texts"]]


@given(text=TEXT)
def test_stream_joined_is_the_text_in_complete_characters(name, text):
    tokenizer = LOADED[name]
    ids = tokenizer.encode(text)
    joined = "".join(streamed(tokenizer, ids))
    assert joined == tokenizer.decode(ids) and REPLACEMENT not in joined


@given(ids=st.lists(st.integers(0, LOADED["tokenizer"].vocab_size - 1), max_size=20))
def test_stream_of_any_ids_joined_is_their_text(ids):
    tokenizer = LOADED["tokenizer"]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_stream_gives_each_word_as_soon_as_it_is_there(name):
    tokenizer = LOADED[name]
    ids = tokenizer.encode("The quick", add_special_tokens=False)
    pieces = streamed(tokenizer, ids)
    assert "" not in pieces[:-1] and len(pieces) == len(ids) + 1


def test_stream_keeps_the_space_behind_a_special_token(name):
    tokenizer = LOADED[name]
    ids = [*tokenizer.encode("The", add_special_tokens=False), tokenizer.eos, *tokenizer.encode(" quick")]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=False)) == tokenizer.decode(ids, False)


def test_character_cut_off_at_the_end_comes_out_as_replacement(name):
    tokenizer = LOADED[name]
    ids = tokenizer.encode("ж", add_special_tokens=False)[:-1]
    *pieces, rest = streamed(tokenizer, ids)
    assert REPLACEMENT not in "".join(pieces) and rest.endswith(REPLACEMENT)


def test_truncation_and_padding_of_whoever_saved_it_are_dropped(name, folder):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=100)
    backend.save(str(folder / "tokenizer.json"))
    text = EXPECTED[name]["texts"][0]
    assert Tokenizer.from_folder(folder).encode(text) == LOADED[name].encode(text)


def test_special_tokens_may_be_objects_lie_in_a_file_of_their_own_or_be_missing(name, folder):
    config, own = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    config.write_text(json.dumps({"bos_token": {"content": "<s>", "lstrip": False}}))
    assert Tokenizer.from_folder(folder).bos == LOADED[name].bos
    config.unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (None, None, None)
    own.write_text(json.dumps({"bos_token": "<s>"}))
    assert Tokenizer.from_folder(folder).bos == LOADED[name].bos


def test_template_may_lie_in_tokenizer_config(name, folder):
    template, file = (folder / "chat_template.jinja").read_text(), folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    assert Tokenizer.from_folder(folder).chat_template == template
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    file.write_text(json.dumps({"chat_template": several}))
    assert Tokenizer.from_folder(folder).chat([]) == "yes"


def test_a_template_knows_the_date_and_may_loop_over_a_long_conversation():
    assert with_template("{{ strftime_now('%Y') }}").chat([]).isdigit()
    template = "{% for m in messages %}{{ 2 ** 3 * 2 }}{{ '-' * 3 }}{{ m.content }}{% endfor %}"
    turns = [{"role": "user", "content": "Hello"}] * 10_000
    assert with_template(template).chat(turns) == "16---Hello" * 10_000


def test_a_debugger_finds_its_trace_again():
    before = sys.gettrace()
    trace = lambda *_: None  # noqa: E731
    sys.settrace(trace)
    try:
        with_template("x").chat([])
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
