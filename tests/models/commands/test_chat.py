"""`python -m models.chat`: what goes through the model in each turn, and what a user sees."""

import dataclasses
import io
import json
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
import models
from benchmarks.measure import compilations
from models.commands import chat
from models.commands.actions.chat import Conversation, _sampling, _sampling_in_words
from models.tokenizer import Tokenizer
from tests.models import reference
from tests.tiers import first

TEMPLATES = {file.stem: file.read_text("utf-8") for file in sorted(Path(__file__).with_name("templates").iterdir())}
CHATML, LLAMA, SYSTEM_LAST, WITHOUT_THOUGHTS = (TEMPLATES[n] for n in ("chatml", "llama", "system_last", "thoughts"))
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
END = "<|im_end|>"
SETTINGS = dict(policy="snapkv(window=4)+caote", budget=48, block=16, max_new_tokens=9)
ONE_LINE = re.compile(r"\[error: [^\n]+\]\n")


def tokenizer_of(template):
    """A token a byte, and those of templates."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, template)


def spaced(template):
    """The same in SentencePiece's manner: a blank is put before a text."""
    words = ["▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = tokenizers.models.BPE({word: n for n, word in enumerate(words)}, [], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, template)


CONFIG = models.Config(  # an answer ends now and then
    256 + len(SPECIAL), 16, 16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, max_positions=600,
    eos=tuple(range(0, 256, 11)),
)  # fmt: skip


@pytest.fixture
def talk(model):
    return Conversation(model, tokenizer_of(CHATML), **SETTINGS)


def say(talk, text):
    return "".join(talk.answer(text))


def run(monkeypatch, capsys, lines, *flags):
    """What a chat with the embedded model prints: its exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    code = chat.main(["retriever", *flags])
    return code, *capsys.readouterr()


SMALL = ["--policy", "h2o+caote", "--budget", "32", "--block", "16", "--max-new-tokens", "6"]
OF_SMALL = dict(policy="h2o+caote", budget=32, block=16, max_new_tokens=6)


class Seen(NamedTuple):
    """In a cache's place: all tokens that it has met."""

    tokens: tuple[int, ...]
    nbytes: int = 0

    @property
    def next_position(self):
        return np.array([len(self.tokens)])


class Scripted:
    """In a model's place: gives the answers that it was told to give."""

    def __init__(self, tokenizer, answers):
        # No model is run: only the tokens that end an answer are read.
        self.config = models.Config(
            256 + len(SPECIAL), 16, 16, 1, 1, 1, eos=tuple(map(tokenizer.backend.token_to_id, SPECIAL))
        )
        self.embedding = None
        self.answers = [tokenizer.continuation(answer) for answer in answers]
        self.asked = []  # all tokens before each answer

    def stream(self, model, tokens, *, cache, max_new_tokens, **_):
        def steps():
            before = (*(() if cache is None else cache.tokens), *tokens[0])
            if max_new_tokens == 1:
                yield np.array([0]), Seen(before)
                return
            self.asked.append(before)
            answer = self.answers.pop(0)
            for index, token in enumerate(answer):
                yield np.array([token]), Seen((*before, *answer[:index]))

        return steps()


TURN = st.tuples(
    st.text("ab \n?é", min_size=1, max_size=5),
    st.sampled_from(["Hello", " Hé ", "x\n", "<think>\nwhy\n</think>\n\nSo", "why\n</think>\n\nSo", " "]),
    st.sampled_from([END, "</s>", ""]),
)


@pytest.mark.parametrize("made", [tokenizer_of, spaced])
@pytest.mark.parametrize("template", TEMPLATES)
@given(turns=st.lists(TURN, min_size=1, max_size=4), system=st.sampled_from([None, "Be kind."]))
@settings(max_examples=10)
def test_tokens_are_those_of_the_template_over_the_whole_conversation(template, made, system, turns):
    tokenizer = made(TEMPLATES[template])
    scripted = Scripted(tokenizer, [answer + end for _, answer, end in turns])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "stream", scripted.stream)
        patch.setattr(models, "output_projection", lambda *_: None)
        talk = Conversation(scripted, tokenizer, system=system, max_new_tokens=99)
        for text, _, _ in turns:
            say(talk, text)
    messages = [] if system is None else [{"role": "system", "content": system}]
    for asked, (text, answer, _) in zip(scripted.asked, turns, strict=True):
        messages.append({"role": "user", "content": text})
        assert list(asked) == tokenizer.encode(tokenizer.chat(messages), add_special_tokens=False)
        messages.append({"role": "assistant", "content": answer})


@pytest.mark.parametrize(
    ("template", "said", "sentence"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", 1, "leaves earlier answers out"),
        ("{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}", 2, "renders each turn differ"),
    ],
    ids=["drops answers", "numbers turns"],
)
def test_a_template_that_cannot_go_on_says_so(template, said, sentence, monkeypatch):
    tokenizer = tokenizer_of(template)
    scripted = Scripted(tokenizer, ["one"] * 4)
    monkeypatch.setattr(models, "stream", scripted.stream)
    monkeypatch.setattr(models, "output_projection", lambda *_: None)
    talk = Conversation(scripted, tokenizer, max_new_tokens=99)
    for _ in range(said):
        say(talk, "more")
    before = talk.now
    with pytest.raises(ValueError, match=f"{sentence}.*/forget"):
        say(talk, "more")
    assert talk.now is before
    talk.forget()
    say(talk, "more")


def streamed(model, fed, **settings):
    """Return an answer's tokens and the cache behind it, by the programs that a conversation runs."""
    steps = list(models.stream(model, [fed], **settings))
    return [int(token[0]) for token, _ in steps], steps[-1][1]


def by_hand(model, tokenizer, texts, lengths=None, **settings):
    """The answers' texts, each by `models.stream` from the cache of the one before."""
    answers, cache, pending, messages, told, said_before = [], None, [], [], "", []
    for n, text in enumerate(texts):
        messages.append({"role": "user", "content": text})
        whole = tokenizer.chat(messages)
        assert whole.startswith(told)
        fed = [*pending, *tokenizer.encode(whole.removeprefix(told), add_special_tokens=False)]
        most = settings["max_new_tokens"] if lengths is None else lengths[n]
        draws = models.Draws(seen=np.isin(np.arange(CONFIG.vocab_size), said_before)[None])
        answer, cache = streamed(model, fed, cache=cache, key=draws, **settings | {"max_new_tokens": most})
        ended = answer[-1] in model.config.eos
        said_before = [*said_before, *fed, *(answer[:-1] if ended else answer)]
        pending = [] if ended else answer[-1:]
        said = tokenizer.decode(answer[:-1] if ended else answer)
        messages.append({"role": "assistant", "content": said})
        told = whole + said
        answers.append(said)
    return answers


TEXTS = [f"Tell me {n:02} things." for n in range(12)]


@pytest.mark.parametrize("each_way", first(1, ["one program", "layers"]), indirect=True)
def test_twelve_turns_take_the_bytes_and_the_programs_of_the_first_ones(each_way):
    config = dataclasses.replace(CONFIG, max_positions=601)  # of its own: no test before has compiled its programs
    model = reference.decoder(config)
    talk, sizes, programs = Conversation(model, tokenizer_of(CHATML), **SETTINGS), [], []
    for text in TEXTS:
        with compilations() as compiled:
            say(talk, text)
            sizes.append((talk.nbytes, talk.held <= 48 + 16 + 4))
        programs.append(len(compiled))
    assert len(set(sizes[1:])) == 1 and sizes[-1][1]
    assert programs[0] > 0 and programs[3:] == [0] * 9
    assert talk.seen > 300


def test_answers_are_those_of_one_stream_after_another(model, talk):
    assert [say(talk, text) for text in TEXTS[:6]] == by_hand(model, talk.tokenizer, TEXTS[:6], **SETTINGS)


def test_a_repetition_penalty_counts_the_whole_conversation(model, tmp_path):
    penalised, file = SETTINGS | dict(repetition_penalty=1.7), tmp_path / "talk.cache"
    talk, other = (Conversation(model, tokenizer_of(CHATML), **penalised) for _ in range(2))
    said = [say(talk, text) for text in TEXTS[:2]]
    talk.keep(file)
    said.append(say(talk, TEXTS[2]))
    assert said == by_hand(model, talk.tokenizer, TEXTS[:3], **penalised)
    other.load(file)
    assert other.now.seen == talk.before.seen and say(other, TEXTS[2]) == said[2]
    kvjax.save_cache(file, talk.now.cache, **talk._made_with())
    with pytest.raises(ValueError, match="does not say which tokens were said, which a repetition penalty needs"):
        other.load(file)
    plain = Conversation(model, tokenizer_of(CHATML), **SETTINGS | dict(repetition_penalty=None))
    plain.load(file)  # which needs to know of none
    assert plain.now.pending == () and plain.nbytes == talk.nbytes


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "temperature 0.6, top_k 20, repetition_penalty 1.1"),
        ("--repetition-penalty 1 --min-p 0.1", "temperature 0.6, top_k 20, min_p 0.1"),
        ("--temperature 0.5 --top-p 0.9", "temperature 0.5, top_p 0.9"),
        ("--temperature 0 --repetition-penalty 1.2 --top-k 4", "the most likely tokens, repetition_penalty 1.2"),
        ("--temperature 0", "the most likely tokens"),
    ],
)
def test_tokens_are_drawn_as_published_but_for_the_flags(tmp_path, flags, words):
    published = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    sampling = _sampling(chat.parser().parse_args([str(tmp_path), *flags.split()]))
    assert _sampling_in_words(sampling) == words


def test_an_answer_that_was_stopped_is_part_of_the_conversation(talk, tmp_path):
    pieces = []
    for piece in talk.answer(TEXTS[0]):
        pieces.append(piece)
        if len(pieces) == 3:
            talk.stop()
    talk.keep(tmp_path / "talk.cache")
    answers = ["".join(pieces), say(talk, TEXTS[1])]
    assert answers == by_hand(talk.model, talk.tokenizer, TEXTS[:2], [3, 9], **SETTINGS)


def test_a_turn_that_is_given_up_leaves_the_conversation_as_it_was(model, talk):
    say(talk, TEXTS[0])
    with pytest.MonkeyPatch.context() as patch:
        stream = models.stream
        patch.setattr(models, "stream", lambda *a, **k: talk.stop() or stream(*a, **k))
        with pytest.raises(KeyboardInterrupt):
            say(talk, "Never said.")
    assert say(talk, TEXTS[1]) == by_hand(model, talk.tokenizer, TEXTS[:2], **SETTINGS)[1]


@pytest.mark.parametrize("each_way", first(1, ["one program", "layers"]), indirect=True)
def test_a_conversation_is_kept_and_goes_on(talk, tmp_path, each_way):
    file = tmp_path / "talk.cache"
    said = [say(talk, TEXTS[0])]
    before = talk.now
    assert before.pending  # fed by itself, this token would have the policy evict once more
    talk.keep(file)
    assert talk.now is before
    said.append(answer := say(talk, TEXTS[1]))
    assert said == by_hand(talk.model, talk.tokenizer, TEXTS[:2], **SETTINGS)
    other = Conversation(talk.model, talk.tokenizer, **SETTINGS)
    say(other, "Something else.")
    other.load(file)
    assert say(other, TEXTS[1]) == answer
    talk.keep(file)  # its own file may be written again


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(policy="h2o"), "the policy snapkv.* and this one has h2o"),
        (dict(budget=64), "the budget 48, and this one has 64"),
        (dict(cache_dtype=("float32", "int8")), "the dtype float32, and this one has float32/int8"),
    ],
)
def test_a_conversation_of_another_kind_is_not_taken(talk, tmp_path, settings, sentence):
    say(talk, TEXTS[0])
    talk.keep(tmp_path / "talk.cache")
    other = Conversation(talk.model, talk.tokenizer, **SETTINGS | settings)
    with pytest.raises(ValueError, match=sentence):
        other.load(tmp_path / "talk.cache")
    retriever, tokenizer = models.load("retriever")
    with pytest.raises(ValueError, match="with another model"):
        Conversation(retriever, tokenizer, **SETTINGS).load(tmp_path / "talk.cache")


def test_a_terminal_is_told_what_there_is(monkeypatch, capsys):
    stdin = io.StringIO("/help\n")
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    assert chat.main(["retriever", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("> ")
    assert err.count("/save FILE, /load FILE, /forget, /memory, /help and /quit; Ctrl-C ends an answer.") == 2


def test_plain_text_goes_on_where_there_is_no_template(monkeypatch, capsys):
    texts = ["The code of amber falcon is 4719.", "Question: what is the code of amber falcon? Answer:"]
    _, out, err = run(monkeypatch, capsys, texts, *SMALL)
    assert "no chat template" in err
    model, tokenizer = models.load("retriever")
    first, cache = streamed(model, tokenizer.encode(texts[0]), **OF_SMALL)
    tokens = [first[-1], *tokenizer.encode("\n" + texts[1], add_special_tokens=False)]
    second, _ = streamed(model, tokens, cache=cache, **OF_SMALL)
    assert out == "".join(tokenizer.decode(x) + "\n" for x in (first, second))


def test_what_was_kept_goes_on_elsewhere(monkeypatch, capsys, tmp_path):
    file = str(tmp_path / "talk.cache")
    lines = ["The code of amber falcon is 4719.", f"/save {file}", "What is the code of amber falcon? Answer:"]
    code, out, err = run(monkeypatch, capsys, [*lines, "/quit", "never"], *SMALL)
    assert code == 0 and f"saved in {file}" in err
    assert "> " not in out and "Ctrl-C" not in err, "a pipe gets answers alone"
    assert len(re.findall(r"\[\d+ tokens seen · \d+ held · \d\.\d\d .*, peak \d\.\d\d · [\d.]+ tokens/s\]\n", err)) == 2
    _, said, _ = run(monkeypatch, capsys, ["Something else.", f"/load {file}", lines[2]], *SMALL)
    assert said.split("\n")[1] == out.split("\n")[1]
    more = [lines[2], f"/save {file}"]  # its own file may be written again
    _, said, err = run(monkeypatch, capsys, more, "--load", file, *SMALL[4:])
    assert said == out.split("\n", 1)[1] and f"saved in {file}" in err


def test_an_error_in_a_turn_is_one_sentence_and_the_conversation_goes_on(monkeypatch, capsys, tmp_path):
    broken, mine = tmp_path / "broken.cache", tmp_path / "mine.txt"
    mine.write_text("mine")
    lines = ["The river was calm.", f"/save {broken}"]
    run(monkeypatch, capsys, lines, *SMALL)
    content = bytearray(broken.read_bytes())
    content[-9] ^= 1
    broken.write_bytes(content)
    bad = [
        f"/load {broken}", f"/load {mine}", f"/load {tmp_path}/none", f"/load {tmp_path}", "/load", "/save",
        f"/save {mine}", f"/save {tmp_path}/none/x", f"/save {tmp_path}", "/nonsense", "x\udcff",
    ]  # fmt: skip
    code, out, err = run(monkeypatch, capsys, ["The river was calm.", *bad, "It rained."], *SMALL)
    assert code == 0
    assert len(ONE_LINE.findall(err)) == len(bad), err
    assert mine.read_text() == "mine"
    _, plain, _ = run(monkeypatch, capsys, ["The river was calm.", "It rained."], *SMALL)
    assert out == plain


class Interrupting(io.StringIO):
    """A terminal whose user presses Ctrl-C when so much was written."""

    after = 3

    def write(self, text):
        self.after -= bool(text)
        if text and self.after == 0:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_an_interrupt_ends_the_answer_and_not_the_conversation(monkeypatch, capsys, ctrl_c):
    screen = Interrupting()
    monkeypatch.setattr(sys, "stdout", screen)
    code, _, err = run(monkeypatch, capsys, ["The river was calm.", "It rained."], *SMALL)
    assert code == 0
    assert err.count("tokens seen") == 2
    model, tokenizer = models.load("retriever")
    first, _ = screen.getvalue().splitlines()
    tokens, _ = streamed(model, tokenizer.encode("The river was calm."), **OF_SMALL | {"max_new_tokens": 3})
    assert first == tokenizer.decode(tokens)


def test_a_chat_warns_of_sums_that_never_fall(model):
    talk = Conversation(model, tokenizer_of(None), policy="h2o+protect(recent=0)", budget=4, block=4, max_new_tokens=6)
    with pytest.warns(UserWarning, match=r"'h2o\+protect\(recent=0\)' sums attention over all queries"):
        list(talk.answer("Hello"))
