"""The retriever's tokenizer and training rows: prose, facts, very many questions about them, and places named twice.

A row is a pure function of (seed, step, row), so training that resumes reads the same rows. Sentences are tokenised one
word at a time with a memo. The tokenizer never merges across a space, so the ids are those of the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from evals import prose, sweep, tasks
from papers.predictor import coref_task

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
_WORD = re.compile(r"\n| ?[^ \n]+")
_PIECE = re.compile(r"[a-z]{1,6}|Ġ[A-Z][a-z]{0,4}")
_SENTENCE_END = re.compile(r"(?<=[.?]) ")
# Kinds of target: the first digit of a value stated earlier, which requires finding the key; its other digits, which
# require following it; ordinary text; the first digit where the question came before the text; a place's name when it
# is repeated. 0: nothing to learn, such as a value or a name that is stated for the first time.
FIRST, REST, TEXT, BEFORE, NAME = 1, 2, 3, 4, 5
KINDS = (FIRST, REST, TEXT, BEFORE, NAME)

WORDS = sweep.read(Path(__file__).with_name("words.toml"))  # what its sentences and names are made of


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE with one token per digit (including a space before it) and per key word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1536,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = np.random.default_rng(0)
    sentences = [*prose.sentences("train"), *(template_sentence(rng) for _ in range(4000))]
    corpus = [*sentences, *(f" {sentence}" for sentence in sentences)]  # as the first sentence of a text and as others
    # Repeated, so that the merges of these words come before those of ordinary words.
    words = " ".join([*prose.ADJECTIVES, *prose.NOUNS, *prose.ATTRIBUTES])
    corpus += [f"Question: what is the {words}?\nAnswer: The the of is 1 2 3 4 5 6 7 8 9 0."] * 400
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def template_sentence(rng: np.random.Generator) -> str:
    """Return a random sentence about people, places and things; it never states a fact that a question asks for."""
    who = f"{'The' if rng.random() < 0.6 else 'A'} {tasks.pick(rng, WORDS['people'])}"

    def drawn(field: re.Match[str]) -> str:
        match field[1]:
            case "who":
                return who
            case "count":
                return str(int(rng.integers(2, 100)))
            case "noun":
                return tasks.pick(rng, prose.NOUNS)
            case "thing":
                like = f"{tasks.pick(rng, prose.ADJECTIVES)} " if rng.random() < 0.4 else ""
                return f"the {like}{tasks.pick(rng, prose.NOUNS)}"
            case kind:
                return tasks.pick(rng, WORDS[kind])

    sentence = re.sub(r"\{(\w+)\}", drawn, tasks.pick(rng, WORDS["sentences"]))
    return sentence[0].upper() + sentence[1:]


def _filler_sentence(rng: np.random.Generator) -> str:
    """Draw a sentence without facts: two thirds come from templates, one third from :func:`evals.prose.sentences`."""
    return tasks.pick(rng, prose.sentences("train")) if rng.random() < 1 / 3 else template_sentence(rng)


def _invented_name(rng: np.random.Generator) -> str:
    """Return a name for a place from random syllables; never one that the co-reference task tests with."""
    while True:
        word = "".join(
            tasks.pick(rng, WORDS["onsets"]) * (i > 0 or rng.random() < 0.8)
            + tasks.pick(rng, WORDS["vowels"])
            + tasks.pick(rng, WORDS["codas"]) * (rng.random() < 0.4)
            for i in range(int(rng.integers(2, 4)))
        ).capitalize()
        name = f"{word} {tasks.pick(rng, WORDS['lands'])}" if rng.random() < 0.2 else word
        if name not in coref_task.pools("test").names:
            return name


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of BOS, EOS or PAD; ValueError for another tokenizer than that of :func:`train_tokenizer`."""
    index = tokenizer.token_to_id(token)
    if index is None:
        raise ValueError(f"the tokenizer has no {token}; use one that train_tokenizer made.")
    return index


class Level(NamedTuple):
    """The difficulty of a phase's rows; a pair is a range that each row draws from."""

    length: int
    facts: tuple[int, int]
    filler: tuple[float, float]  # share of sentences without facts
    two_words: float = 1.0  # share of keys with two words
    alike: float = 0.3  # share of facts that look like another
    before: float = 0.2  # share of rows whose questions come before the text
    episodes: bool = True  # those rows hold many short texts, each after its question; else one text as long as the row
    prose: float = 0.05  # share of rows without facts
    library: float = 0.0  # share of their sentences that are sure to be from the haystack's file
    places: float = 0.0  # share of rows in which places are named, and named again later
    pieces: float = 0.0  # share of those names that are made of any tokens, all of which are then repeated at times
    cues: float = 0.0  # share of those names that are repeated after an arbitrary sentence with a colon
    reach: int = 0  # the largest position that jumps between sentences may lead to


class Batch(NamedTuple):
    """Training rows: tokens, their positions, the next tokens, and the kind of each of these."""

    tokens: Int[np.ndarray, "B T"]
    positions: Int[np.ndarray, "B T"]
    targets: Int[np.ndarray, "B T"]
    kinds: Int[np.ndarray, "B T"]  # of the targets: one of KINDS, or 0


class Writer:
    """Tokenises texts and writes training rows."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.bos = special_id(tokenizer, BOS)
        self._words: dict[str, list[int]] = {}
        pieces = sorted(piece for piece in tokenizer.get_vocab() if _PIECE.fullmatch(piece))
        self._starts = [piece[1:] for piece in pieces if piece[0] == "Ġ"]
        self._pieces = [piece for piece in pieces if piece.islower()]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS; the text may begin with a space or a new line."""
        ids: list[int] = []
        for word in _WORD.findall(text):
            known = self._words.get(word)
            if known is None:
                known = self._words[word] = self.tokenizer.encode(word, add_special_tokens=False).ids
            ids += known
        return ids

    def pieced_name(self, rng: np.random.Generator) -> str:
        """Return a name made of tokens; never one that the co-reference task tests with."""
        while True:
            start = tasks.pick(rng, self._starts if rng.random() < 0.5 else self._pieces).capitalize()
            name = start + "".join(tasks.pick(rng, self._pieces) for _ in range(int(rng.integers(1, 5))))
            if name not in coref_task.pools("test").names:
                return name

    def batch(self, level: Level, rows: int, seed: int, step: int) -> Batch:
        """Return the rows that training reads at this step."""
        made = [self.row(level, np.random.default_rng([seed, step, row])) for row in range(rows)]
        tokens, positions, kinds = np.array(made, np.int32).swapaxes(0, 1)
        return Batch(tokens[:, :-1], positions[:, :-1], tokens[:, 1:], kinds[:, 1:])

    def row(self, level: Level, rng: np.random.Generator) -> tuple[list[int], list[int], list[int]]:
        """Return ``level.length`` + 1 ids, their positions, and the kind of each as a target.

        If the level's ``reach`` exceeds its length, positions jump between some sentences, so that a short row has the
        distances of a long one.
        """
        draw = rng.random()
        other = draw >= level.prose + level.before + level.places
        streams = other and rng.random() < 0.5
        row = _Row(self, level, rng, filler=1.0 if draw < level.prose else None)
        if draw < level.prose:
            while row.space():
                row.add_prose()
        elif draw < level.prose + level.before:
            while level.episodes and row.space():
                row.add_episode()
            if not level.episodes:
                row.add_question_then_text()
        elif not other:
            while row.space():
                row.add_story()
        elif streams:
            row.add_stream()
        else:
            row.add_text_then_questions()
        size = level.length + 1
        return row.ids[:size], row.positions[:size], row.kinds[:size]


class _Row:
    """A row that is being written."""

    def __init__(self, writer: Writer, level: Level, rng: np.random.Generator, filler: float | None = None):
        self.writer, self.level, self.rng = writer, level, rng
        self.ids, self.positions, self.kinds = [writer.bos], [0], [0]  # of the tokens so far
        self.stated: list[tasks.Fact] = []
        self.to_ask: list[tasks.Fact] = []
        self.filler = float(rng.uniform(*level.filler)) if filler is None else filler
        self.facts = int(rng.integers(level.facts[0], level.facts[1] + 1))
        self.line_start = True
        self.to_jump = int(rng.integers(max(1, level.reach - level.length)))

    def space(self, until: float = 1.0) -> bool:
        return len(self.ids) < 1 + until * self.level.length

    def add(self, text: str, stated: bool | None = None) -> None:
        """Add a sentence. If it ends with a value, ``stated`` says whether the row has stated the value before."""
        ids = self.writer.encode(text if self.line_start else " " + text)
        kinds = [TEXT] * len(ids)
        if stated is not None:
            kinds[-5:-1] = [FIRST, REST, REST, REST] if stated else [0] * 4
        self.extend(ids, kinds)
        self.line_start = False

    def extend(self, ids: list[int], kinds: list[int]) -> None:
        start = self.positions[-1] + 1
        self.positions += range(start, start + len(ids))
        self.ids += ids
        self.kinds += kinds

    def maybe_jump(self) -> None:
        """Skip, between two sentences, some of the positions that the row may skip."""
        if self.to_jump and self.rng.random() < 0.15:
            size = int(self.rng.integers(self.to_jump + 1))
            self.positions[-1] += size
            self.to_jump -= size

    def new_line(self) -> None:
        if not self.line_start:
            self.extend(self.writer.encode("\n"), [TEXT])
        self.line_start = True

    def add_line(self, text: str) -> None:
        self.new_line()
        self.add(text)
        self.new_line()

    def add_filler(self) -> None:
        self.maybe_jump()
        self.add(_filler_sentence(self.rng))

    def add_prose(self) -> None:
        if self.level.library and self.rng.random() < self.level.library:
            self.maybe_jump()
            self.add(tasks.pick(self.rng, prose.sentences("train")))
        else:
            self.add_filler()

    def add_fact(self) -> tasks.Fact:
        self.maybe_jump()
        fact = self._fact()
        self.stated.append(fact)
        self.add(self._statement(fact), stated=False)
        return fact

    def add_question(self) -> None:
        """Ask for a fact stated earlier; every fact is asked for once before one is asked for again."""
        self.maybe_jump()
        if not self.to_ask:
            self.to_ask = [self.stated[i] for i in self.rng.permutation(len(self.stated))]
        fact = self.to_ask.pop()
        form = self.rng.random()
        if form < 0.5:  # a repetition is the shortest question: it needs no extra words
            self.add(self._statement(fact), stated=True)
            return
        self.add_line(tasks.question(fact))
        self.add(f"{tasks.cue(fact, 'after' if form < 0.8 else 'before')} {fact.value}.", stated=True)
        self.new_line()

    def add_stream(self) -> None:
        """Add facts and questions in mixed order; a question may follow as soon as there is a fact."""
        while self.space():
            if self.rng.random() < self.filler:
                self.add_filler()
            elif len(self.stated) < self.facts and (not self.stated or self.rng.random() < 0.5):
                self.add_fact()
            else:
                self.add_question()

    def add_text_then_questions(self) -> None:
        """Add all facts in the first part, at random places among the prose, and questions in the rest."""
        share = float(self.rng.uniform(0.5, 0.85))
        while self.space(share):
            left = share * self.level.length - len(self.ids)
            missing = self.facts - len(self.stated)
            # A sentence takes about 13 tokens: towards the end, missing facts take the place of prose.
            if missing > 0 and (self.rng.random() > self.filler or missing * 13 > left):
                self.add_fact()
            else:
                self.add_filler()
        if not self.stated:
            self.add_fact()
        while self.space():
            self.add_question()

    def add_question_then_text(self) -> None:
        """Add a question, a text with its answer among other facts, the answer, and questions of the other kind."""
        rng, size = self.rng, self.level.length
        share = float(rng.uniform(0.35, 0.9))
        asked = self._fact()
        self.stated.append(asked)
        self.add_line(tasks.question(asked))
        # The place of the asked fact is drawn first. A fact takes about 13 tokens; prose fills the rest.
        facts = min(self.facts, max(1, int((share * size - len(self.ids)) / 13)))
        at, stated = int(rng.integers(facts)), 0
        while stated < facts or self.space(share):
            left = share * size - len(self.ids)
            if stated < facts and (rng.random() > self.filler or (facts - stated) * 13 > left):
                if stated == at:
                    self.maybe_jump()
                    self.add(self._statement(asked), stated=False)
                else:
                    self.add_fact()
                stated += 1
            else:
                self.add_filler()
        if not self.add_answer(asked, again=0.2):
            self.kinds[-5] = BEFORE
        self.new_line()
        while self.space():
            self.add_question()

    def add_episode(self) -> None:
        """Add a question, a text that holds its answer, and the answer; sometimes the question is repeated."""
        rng = self.rng
        asked = self._fact()
        self.stated.append(asked)
        count = int(rng.integers(1, self.facts + 1))
        self.add_line(tasks.question(asked))
        at = int(rng.integers(count))
        for i in range(count):
            while rng.random() < self.filler and self.space(0.9):
                self.add_filler()
            if i == at:
                # The key is known from the question, but the value is stated here for the first time.
                self.add(self._statement(asked), stated=False)
            else:
                self.add_fact()
        self.add_answer(asked, again=0.3)
        self.new_line()
        for _ in range(int(rng.integers(3))):
            self.add_question()

    def add_answer(self, asked: tasks.Fact, again: float) -> bool:
        """Add the answer to a question asked before the text; repeat the question with a probability, and tell it."""
        self.new_line()
        repeated = self.rng.random() < again
        if repeated:
            self.add_line(tasks.question(asked))
        self.add(f"{tasks.cue(asked, 'after' if repeated else 'before')} {asked.value}.", stated=True)
        return repeated

    def add_story(self) -> None:
        """Add a place's name, other sentences, and the name again: the co-reference task's story, or a shorter one."""
        rng = self.rng
        story = coref_task.story(rng, "train")
        if self.level.pieces and rng.random() < self.level.pieces:
            name = self.writer.pieced_name(rng)
        else:
            name = story.name if rng.random() < 0.3 else _invented_name(rng)
        short = self.level.length < 512 or rng.random() < 0.5
        self.maybe_jump()
        self.add("The place is:" if short and rng.random() < 0.5 else story.introduction)
        self.add_name(name, stated=False)
        for distraction in self._short_distractions(story) if short else story.distractions:
            self.maybe_jump()
            self.add(distraction)
        self.maybe_jump()
        if self.level.cues and rng.random() < self.level.cues:
            self.add(f"{_filler_sentence(rng)[:-1]}:")
        else:
            self.add(f"{story.tie_back}:")
        self.add_name(name, stated=True)
        while short and rng.random() < 0.5:
            self.add("The place is:")
            self.add_name(name, stated=True)
        if self.stated and rng.random() < 0.5:
            self.add_question()

    def _short_distractions(self, story: coref_task.Story) -> Iterator[str]:
        """Yield a few sentences: of the story's distractions or of the haystack; or add facts to ask for later."""
        for _ in range(int(self.rng.integers(5))):
            match int(self.rng.integers(3)):
                case 0:
                    yield tasks.pick(self.rng, _SENTENCE_END.split(tasks.pick(self.rng, story.distractions)))
                case 1:
                    yield _filler_sentence(self.rng)
                case _:
                    self.add_fact()

    def add_name(self, name: str, stated: bool) -> None:
        """Add the name of a place and a full stop; ``stated`` says whether the place has been named before."""
        ids = self.writer.encode(f" {name}.")
        self.extend(ids, [NAME if stated else 0] * (len(ids) - 1) + [TEXT])

    def _fact(self) -> tasks.Fact:
        return tasks.random_fact(self.rng, self.stated, two_words=self.level.two_words, alike=self.level.alike)

    def _statement(self, fact: tasks.Fact) -> str:
        plain = self.rng.random() < 0.5
        return tasks.statement(fact, "" if plain else tasks.pick(self.rng, tasks.INTRODUCTIONS))
