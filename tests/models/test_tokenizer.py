"""Text to ids and back, whole and streamed, and chats: as transformers does it (golden files: make_golden.py)."""

import json
import shutil

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

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


def test_of_two_chat_templates_the_one_that_transformers_reads_is_read_and_the_other_is_named(name, folder):
    (folder / "tokenizer.model").write_bytes(b"which many models have, and nobody reads")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "another"}))
    with pytest.warns(UserWarning, match=r"chat_template\.jinja is read, .* and not the different chat_template of"):
        assert Tokenizer.from_folder(folder).chat_template == (folder / "chat_template.jinja").read_text()


THOUGHTFUL = """{%- if tools %}{% for tool in tools %}<tool>{{ tool | tojson }}</tool>{% endfor %}{% endif -%}
{%- for document in documents or [] %}<doc>{{ document.text }}</doc>{% endfor -%}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor -%}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"""


def test_a_template_reads_tools_documents_and_values_of_its_own():
    tokenizer, hello = with_template(THOUGHTFUL), [{"role": "user", "content": "Hi"}]
    assert tokenizer.chat(hello) == tokenizer.chat(hello, enable_thinking=True) == "<user>Hi<assistant>"
    assert tokenizer.chat(hello, enable_thinking=False) == "<user>Hi<assistant><think></think>"
    told = tokenizer.chat(hello, False, tools=[{"name": "f"}], documents=[{"text": "A."}])
    assert told == '<tool>{"name": "f"}</tool><doc>A.</doc><user>Hi'
    brief = tokenizer.with_values(enable_thinking=False).with_values(documents=[{"text": "A."}])
    assert brief.chat(hello) == "<doc>A.</doc><user>Hi<assistant><think></think>"
    assert brief.chat(hello, enable_thinking=True, documents=None) == "<user>Hi<assistant>"
    with pytest.raises(ValueError, match="tools has a function; give its JSON schema"):
        tokenizer.chat(hello, tools=[len])
    with pytest.raises(ValueError, match="rejected these messages"):
        tokenizer.chat(hello, enable_thinking=object())


def test_a_template_knows_the_date_and_may_loop_over_a_long_conversation():
    assert with_template("{{ strftime_now('%Y') }}").chat([]).isdigit()
    template = "{% for m in messages %}{{ 2 ** 3 * 2 }}{{ '-' * 3 }}{{ m.content }}{% endfor %}"
    turns = [{"role": "user", "content": "Hello"}] * 10_000
    assert with_template(template).chat(turns) == "16---Hello" * 10_000


# --- a text that goes on where another ends --------------------------------------------------------------------------

# What puts a blank before a text, in Llama 2's older and newer files, in T5's, and in RoBERTa's; and what puts none.
BLANKS = {
    "prepended": {},
    "first": dict(normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "always": dict(normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always", split=True)),
    "none": dict(normalizer=normalizers.Replace(" ", "▁")),
    "bytes": dict(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes_first": dict(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
}


def with_blanks(kind):
    name = "tokenizer" if kind.startswith("bytes") else "tokenizer_byte_fallback"
    backend = tokenizers.Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json"))
    for part, value in BLANKS[kind].items():
        setattr(backend, part, value)
    added = [AddedToken("<right>", special=True, rstrip=True), AddedToken("<left>", special=True, lstrip=True)]
    backend.add_tokens([*added, AddedToken("<plain>", normalized=False), AddedToken("<changed>", normalized=True)])
    return Tokenizer(backend)


CONTINUED = {kind: with_blanks(kind) for kind in BLANKS}
PART = st.lists(
    st.sampled_from([*"Thq \n é12$ 中", "Th", " q", "<s>", "<right>", "<left>", "<plain>", "<changed>"]),
    min_size=1, max_size=5,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("kind", BLANKS)
@given(before=PART, text=PART)
def test_ids_of_the_parts_are_those_of_the_whole(kind, before, text):
    tokenizer = CONTINUED[kind]
    head, whole = (tokenizer.encode(part, add_special_tokens=False) for part in (before, before + text))
    assume(whole[: len(head)] == head)  # no token reaches across, and no blank is taken in from there
    assert head + tokenizer.continuation(text, head[-1]) == whole


def test_a_number_goes_on_without_a_blank_and_begins_anew_behind_a_special_token():
    tokenizer = LOADED["tokenizer_byte_fallback"]
    one, two, blank = (tokenizer.backend.token_to_id(token) for token in ("<0x31>", "<0x32>", "▁"))
    assert tokenizer.encode("12") == [tokenizer.bos, blank, one, two]
    assert tokenizer.continuation("12") == [one, two]
    assert tokenizer.continuation("12", tokenizer.eos) == [blank, one, two]
    assert CONTINUED["first"].continuation("12", tokenizer.eos) == [one, two]


def test_a_vocabulary_without_bytes_loses_no_unknown_character():
    words = {word: n for n, word in enumerate(["<unk>", "▁", "a"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Prepend("▁")
    tokenizer = Tokenizer(backend)
    assert tokenizer.continuation("a中") == [2, 0]
    assert tokenizer.continuation("中a") == [1, 0, 2], "the blank stays, where an unknown mark would take it in"


# --- tokens that only tokenizer_config.json and its companions name ---------------------------------------------------


def token(content, **fields):
    """A token as tokenizer_config.json describes it."""
    plain = dict(lstrip=False, rstrip=False, normalized=False, single_word=False, special=True)
    return {"content": content, **plain, **fields}


NEW = LOADED["tokenizer"].vocab_size
TOLD = "x<eot> <tool> <a> <image>"  # what each folder below makes of it; the expected values are transformers 5.24's
FOLDERS = {
    "a named one": ({"eos_token": "<eot>"}, {}, {}, {"<eot>": NEW}, NEW, "x <tool> <a> <image>"),
    "by ids": (
        {"eos_token": "<eot>", "added_tokens_decoder": {str(NEW + 1): token("<tool>", special=False),
                                                        str(NEW): token("<eot>")}},
        {"eos_token": "<pad>"}, {"<a>": NEW}, {"<eot>": NEW, "<tool>": NEW + 1}, NEW, "x <tool> <a> <image>",
    ),
    "additional": ({"additional_special_tokens": ["<a>"]}, {}, {}, {"<a>": NEW}, None, "x<eot> <tool>  <image>"),
    "extra, by name": (
        {"extra_special_tokens": {"image_token": "<image>"}}, {}, {}, {"<image>": NEW}, None, "x<eot> <tool> <a> "),
    "extra": ({"extra_special_tokens": ["<a>"]}, {}, {}, {"<a>": NEW}, None, "x<eot> <tool>  <image>"),
    "of the model": ({"eot_token": "<eot>"}, {}, {}, {"<eot>": NEW}, None, "x <tool> <a> <image>"),
    "in files of their own": (
        {"eos_token": "<|end|>"}, {"eos_token": "<eot>"}, {"<eot>": NEW + 1, "<tool>": NEW},
        {"<eot>": NEW + 1, "<tool>": NEW}, NEW + 1, "x <tool> <a> <image>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_tokens_named_beside_tokenizer_json_are_added(case, tmp_path):
    config, special, added, ids, eos, printed = FOLDERS[case]
    shutil.copy(GOLDEN / "tokenizer" / "tokenizer.json", tmp_path)
    contents = {"tokenizer_config": config, "special_tokens_map": special, "added_tokens": added}
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert {text: tokenizer.encode(text)[1:] for text in ids} == {text: [index] for text, index in ids.items()}
    assert (tokenizer.eos, tokenizer.vocab_size) == (eos, NEW + len(ids))
    assert tokenizer.decode(tokenizer.encode(TOLD)) == printed


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<|end|>"},
        {"additional_special_tokens": ["<|end|>"]},
        {"added_tokens_decoder": {"1": token("<|end|>")}},
    ],
)
def test_a_token_that_only_the_config_calls_special_is_not_printed(config, tmp_path):
    raw = json.loads((GOLDEN / "tokenizer" / "tokenizer.json").read_text())
    for entry in raw["added_tokens"]:
        entry["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("The<|end|>", add_special_tokens=False)) == "The"


def test_a_special_token_is_found_behind_a_letter_however_it_is_normalised(tmp_path):
    raw = json.loads((GOLDEN / "tokenizer_byte_fallback" / "tokenizer.json").read_text())
    for entry in raw["added_tokens"]:
        entry["normalized"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    expected = LOADED["tokenizer_byte_fallback"].encode("The</s>")
    assert Tokenizer.from_folder(tmp_path).encode("The</s>") == expected and expected[-1] == 2


def test_a_template_may_write_a_token_that_the_model_alone_has(folder):
    (folder / "tokenizer_config.json").write_text('{"eot_token": "<eot>"}')
    (folder / "chat_template.jinja").write_text("{{ eot_token }}")
    assert Tokenizer.from_folder(folder).chat([]) == "<eot>"


def test_tokenizer_json_says_what_stands_around_a_text(folder):
    config = folder / "tokenizer_config.json"
    config.write_text('{"bos_token": "<s>", "add_bos_token": true}')
    agrees = Tokenizer.from_folder(folder)
    config.write_text('{"bos_token": "<s>", "add_bos_token": false}')
    with pytest.warns(UserWarning, match="add_bos_token is false, but tokenizer.json puts one around a text"):
        differs = Tokenizer.from_folder(folder)
    assert agrees.encode("a")[0] == differs.encode("a")[0] == differs.bos


def test_a_second_bos_is_told(name):
    tokenizer = LOADED[name]
    with pytest.warns(UserWarning, match="the text begins with <s>, and the tokenizer puts another before it"):
        assert tokenizer.encode("<s>a")[:2] == [tokenizer.bos] * 2
