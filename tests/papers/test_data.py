"""The tokenizer and the training rows."""

import numpy as np
import pytest

from evals import prose
from papers.predictor import coref_task
from papers.retriever import data

LEVEL = data.Level(200, facts=(2, 8), filler=(0.0, 0.6), two_words=0.8)


@pytest.fixture(scope="module")
def writer():
    return data.Writer(data.train_tokenizer())


def test_round_trip_and_digits_apart(writer):
    tokenizer = writer.tokenizer
    text = "The code of amber falcon is 4719.\nQuestion: what is café? Überall 12 345 \t end"
    ids = tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id("<s>")
    assert tokenizer.decode(ids) == text
    pieces = [tokenizer.id_to_token(i) for i in ids]
    assert all(len(piece.replace("Ġ", "")) == 1 for piece in pieces if any(c.isdigit() for c in piece))


def test_key_words_are_single_tokens(writer):
    words = [*prose.ADJECTIVES, *prose.NOUNS, *prose.ATTRIBUTES]
    assert len(words) == len(set(words)) >= 200
    assert all(len(writer.encode(f" {word}")) == 1 for word in words)


def test_word_by_word_is_the_whole_text(writer):
    for seed in range(20):
        ids, positions, kinds = writer.row(LEVEL, np.random.default_rng(seed))
        assert len(ids) == len(kinds) == LEVEL.length + 1
        assert positions == list(range(len(ids)))
        text = writer.tokenizer.decode(ids)
        assert writer.tokenizer.encode(text).ids == ids


def test_every_digit_to_learn_was_stated_before(writer):
    """The digits to learn are values that the row has stated, after the same key, before."""
    for seed in range(40):
        ids, _, kinds = writer.row(LEVEL, np.random.default_rng(seed))
        for at in np.flatnonzero(np.array(kinds) == data.FIRST):
            if at + 4 <= len(ids):
                assert kinds[at + 1 : at + 4] == [data.REST] * 3
                assert writer.tokenizer.decode(ids[at : at + 4]) in writer.tokenizer.decode(ids[:at])


def test_jumps_keep_sentences_together(writer):
    level = LEVEL._replace(reach=2000)
    jumped = 0
    for seed in range(20):
        ids, positions, _ = writer.row(level, np.random.default_rng(seed))
        steps = np.diff(positions)
        assert steps.min() == 1 and positions[-1] < 2000 + 50
        after = np.array(ids)[1:][steps > 1]
        ends = {writer.tokenizer.token_to_id(token) for token in (".", "Ċ")}
        assert set(after.tolist()) <= ends
        jumped += (steps > 1).any()
    assert jumped > 10


def test_every_name_to_learn_was_stated_before(writer):
    """What has to be learned of a name is all of it, and only where the row has stated it before."""
    tokenizer, tested = writer.tokenizer, set(coref_task.pools("test").names)
    for length in (200, 700):
        level = LEVEL._replace(length=length, places=1.0, before=0.0, prose=0.0)
        named = 0
        for seed in range(20):
            ids, _, kinds = writer.row(level, np.random.default_rng(seed))
            assert len(ids) == len(kinds) == length + 1
            learned = np.array(kinds) == data.NAME
            starts = np.flatnonzero(learned & ~np.roll(learned, 1))
            for at in starts:
                end = at + next((i for i, kind in enumerate(kinds[at:]) if kind != data.NAME), len(ids) - at)
                name = tokenizer.decode(ids[at:end])
                assert name in tokenizer.decode(ids[:at]) and name.strip() not in tested
                assert tokenizer.decode(ids[:at])[-1] == ":"
                named += 1
        assert named > 10


def test_places_leave_the_other_rows_as_they_were(writer):
    level = LEVEL._replace(before=1.0, prose=0.0)
    rows = [writer.row(lvl, np.random.default_rng(3)) for lvl in (level, level._replace(places=0.3))]
    assert rows[0] == rows[1]


def test_names_of_pieces_reach_every_token_of_the_tested_names(writer):
    rng = np.random.default_rng(0)
    reached = {token for _ in range(4000) for token in writer.encode(f" {writer.pieced_name(rng)}")}
    tested = {token for name in coref_task.pools("test").names for token in writer.encode(f" {name}")}
    assert tested <= reached


def test_batches_follow_from_seed_and_step(writer):
    one, again = (writer.batch(LEVEL, 4, seed=1, step=7) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not np.array_equal(one.tokens, writer.batch(LEVEL, 4, seed=1, step=8).tokens)
    assert np.array_equal(one.tokens[:, 1:], one.targets[:, :-1])
