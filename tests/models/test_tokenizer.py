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


# As transformers does it


def test_ids_are_those_of_transformers(name):
    assert [LOADED[name].encode(text) for text in EXPECTED[name]["texts"]] == EXPECTED[name]["ids"]


def test_ids_without_special_tokens_are_those_of_transformers(name):
    ids = [LOADED[name].encode(text, add_special_tokens=False) for text in EXPECTED[name]["texts"]]
    assert ids == EXPECTED[name]["plain_ids"]


def test_texts_are_those_of_transformers(name):
    assert [LOADED[name].decode(ids) for ids in EXPECTED[name]["ids"]] == EXPECTED[name]["decoded"]


def test_texts_with_special_tokens_are_those_of_transformers(name):
    texts = [LOADED[name].decode(ids, skip_special_tokens=False) for ids in EXPECTED[name]["ids"]]
    assert texts == EXPECTED[name]["decoded_with_special"]


@pytest.mark.parametrize("prompt", [False, True])
def test_chats_are_those_of_transformers(name, prompt):
    texts = [LOADED[name].chat(chat, add_generation_prompt=prompt) for chat in EXPECTED[name]["chats"]]
    assert texts == [pair[prompt] for pair in EXPECTED[name]["chat_texts"]]


def test_special_ids_are_those_of_transformers(name):
    tokenizer = LOADED[name]
    assert [tokenizer.bos, tokenizer.eos, tokenizer.pad] == EXPECTED[name]["special_ids"]


def test_vocabulary_is_as_large_as_transformers_says(name):
    assert LOADED[name].vocab_size == EXPECTED[name]["vocab_size"]


# Streams


@given(text=TEXT)
def test_stream_joined_is_the_text(name, text):
    tokenizer = LOADED[name]
    ids = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=TEXT)
def test_stream_holds_complete_characters_only(name, text):
    tokenizer = LOADED[name]
    assert REPLACEMENT not in "".join(streamed(tokenizer, tokenizer.encode(text)))


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


def test_stream_can_show_special_tokens(name):
    tokenizer = LOADED[name]
    ids = tokenizer.encode("The")
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=False)) == tokenizer.decode(ids, False)


def test_character_cut_off_at_the_end_comes_out_as_replacement(name):
    tokenizer = LOADED[name]
    ids = tokenizer.encode("ж", add_special_tokens=False)[:-1]
    *pieces, rest = streamed(tokenizer, ids)
    assert REPLACEMENT not in "".join(pieces) and rest.endswith(REPLACEMENT)


# Folders


def test_truncation_and_padding_of_whoever_saved_it_are_dropped(name, folder):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=100)
    backend.save(str(folder / "tokenizer.json"))
    text = EXPECTED[name]["texts"][0]
    assert Tokenizer.from_folder(folder).encode(text) == LOADED[name].encode(text)


def test_special_tokens_may_be_objects(name, folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>", "lstrip": False}}))
    assert Tokenizer.from_folder(folder).bos == LOADED[name].bos


def test_special_tokens_may_lie_in_a_file_of_their_own(name, folder):
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    assert Tokenizer.from_folder(folder).bos == LOADED[name].bos


def test_tokenizer_json_alone_has_no_special_ids(name, folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (None, None, None)


def test_template_may_lie_in_tokenizer_config(name, folder):
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(folder).chat_template == template


def test_of_several_templates_the_default_is_taken(name, folder):
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.from_folder(folder).chat([]) == "yes"


@pytest.mark.parametrize("content", ["", "{", "{}", '{"version": "1.0", "model": {"type": "Nope"}}'])
def test_corrupted_tokenizer_is_named(name, folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is corrupted or of an unknown kind"):
        Tokenizer.from_folder(folder)


def test_corrupted_tokenizer_config_is_named(name, folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "fields", [{"bos_token": 5}, {"eos_token": {"text": "<s>"}}, {"chat_template": ["a"]}], ids=str
)
def test_tokenizer_config_of_another_form(name, folder, fields):
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"the special tokens or the chat template beside .* are not in Hugging Face"):
        Tokenizer.from_folder(folder)


# Templates that go wrong, or mean harm


def test_chat_without_a_template():
    with pytest.raises(ValueError, match="has no chat template"):
        with_template(None).chat([])


def test_messages_that_the_template_refuses():
    with pytest.raises(ValueError, match="rejected these messages: unknown role tool"):
        LOADED["tokenizer"].chat([{"role": "tool", "content": ""}])


def test_template_with_a_syntax_error():
    with pytest.raises(ValueError, match="the chat template rejected these messages"):
        with_template("{% if %}").chat([])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% include '/etc/passwd' %}",
        "{{ 'a'.format.__self__.__class__ }}",
    ],
)
def test_template_cannot_leave_its_sandbox(template):
    try:
        text = with_template(template).chat([])
    except ValueError as error:
        text = str(error)
    assert text == "" or text.startswith("the chat template rejected these messages")


def test_template_knows_the_date():
    assert with_template("{{ strftime_now('%Y') }}").chat([]).isdigit()


def test_text_with_a_lone_surrogate_is_refused():
    tokenizer = Tokenizer.from_folder(GOLDEN / "tokenizer")
    with pytest.raises(ValueError, match="a lone surrogate at character 1"):
        tokenizer.encode("a\udcff")


def test_a_template_may_loop_over_a_long_conversation():
    template = "{% for m in messages %}{{ 2 ** 3 * 2 }}{{ '-' * 3 }}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), None, template)
    turns = [{"role": "user", "content": "Hello"}] * 10_000
    assert tokenizer.chat(turns) == "16---Hello" * 10_000


def test_a_debugger_finds_its_trace_again():
    before = sys.gettrace()
    trace = lambda *_: None  # noqa: E731
    sys.settrace(trace)
    try:
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), None, "x").chat([])
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
