"""Text for training: rows are the documents' ids, a position restores them exactly, and bad files end in a sentence."""

import gzip
import importlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import models
import papers.retriever.rows  # noqa: F401  which adds them to the texts
from evals import prose, texts
from tests.models.commands.test_chat import spaced
from train import text
from train.text import PIECE_BYTES, WRITTEN, open_corpus, python_documents

TEXTS = [f"The {noun} number {i} was counted by the baker. " * (1 + i % 5) for i, noun in enumerate(prose.NOUNS[:60])]


@pytest.fixture(scope="module")
def tokenizer():
    return models.load("retriever")[1]


def write_lines(path, lines, field="text"):
    body = "".join(json.dumps({field: text}) + "\n" for text in lines).encode()
    if path.suffix == ".gz":
        body = gzip.compress(body)
    if path.suffix == ".zst":
        body = importlib.import_module("zstandard").compress(body)
    path.write_bytes(body)
    return str(path)


def ids_of(tokenizer, documents):
    """What rows hold, told apart from how they are read."""
    return [i for text in documents for i in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos]]


def read(corpus, count, position=None):
    return list(itertools.islice(corpus.rows(position), count))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz"])
def test_rows_are_the_documents_joined_by_the_end_token(tokenizer, tmp_path, suffix):
    corpus = open_corpus([write_lines(tmp_path / f"a{suffix}", TEXTS)], tokenizer, 32, eval_rows=2)
    rows = np.stack([row for row, _ in read(corpus, 20)])
    assert (rows[:, 0] == tokenizer.bos).all() and (corpus.held_out[:, 0] == tokenizer.bos).all()
    everything = ids_of(tokenizer, TEXTS)
    assert corpus.held_out[:, 1:].ravel().tolist() == everything[: 2 * 31]
    held_out = next(n for n in range(1, 60) if len(ids_of(tokenizer, TEXTS[:n])) >= 2 * 31)  # whole documents
    assert rows[:, 1:].ravel().tolist() == ids_of(tokenizer, TEXTS[held_out:])[: 20 * 31]


def test_pieces_of_a_text_go_on_where_the_one_before_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PIECE_BYTES", 8)
    tokenizer, lines = spaced(None), "It rained.\n  Then it did not.\n" * 9
    file = str(tmp_path / "a.txt")
    Path(file).write_text(lines)
    corpus = open_corpus([file], tokenizer, 32, eval_names=[file], eval_rows=2)
    whole = tokenizer.encode(lines)
    assert corpus.held_out.ravel().tolist() == whole[: 32 * 2]
    assert np.concatenate([row for row, _ in read(corpus, 5)]).tolist() == whole[: 32 * 5]


@pytest.mark.parametrize("names", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "b.txt", ".", "python,retriever"])
def test_a_position_restores_the_rows(tokenizer, tmp_path, monkeypatch, names):
    monkeypatch.chdir(tmp_path)
    for suffix in (".jsonl", ".jsonl.gz", ".jsonl.zst"):
        write_lines(tmp_path / f"a{suffix}", TEXTS)
    (tmp_path / "b.txt").write_text(
        "Ein Märchen über Käse. " * (PIECE_BYTES // 6)
    )  # pieces, cut between letters' bytes
    corpus = open_corpus([names], tokenizer, 64, eval_rows=2)
    rows = read(corpus, 120)
    for index in (0, 1, 58, 83, 110):
        again = read(corpus, 5, json.loads(json.dumps(rows[index][1])))
        for (row, position), (same_row, same_position) in zip(rows[index + 1 : index + 6], again, strict=False):
            assert np.array_equal(row, same_row) and position == same_position


def test_a_text_that_is_held_out_whole_leaves_no_row_and_a_row_that_ends_with_its_file_goes_on_in_the_next(
    tokenizer, tmp_path
):
    (tmp_path / "a.txt").write_text("The river was calm. " * 12)
    with pytest.raises(ValueError, match="holds no text after what is held out"):
        next(open_corpus([str(tmp_path / "a.txt")], tokenizer, 32, eval_rows=16).rows(None))
    (tmp_path / "b.txt").write_text("It was a quiet day. " * 40)
    (tmp_path / "c.txt").write_text("The code is 4719. " * 40)
    first = 1 + len(ids_of(tokenizer, [(tmp_path / "a.txt").read_text()]))  # with BOS
    named = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    corpus = open_corpus(named, tokenizer, first, eval_names=[str(tmp_path / "c.txt")], eval_rows=1)
    rows = corpus.rows(None)
    (_, position), (second, _) = next(rows), next(rows)
    np.testing.assert_array_equal(next(corpus.rows(position))[0], second)


def test_a_second_epoch_reads_the_same_files_and_shuffles_memory(tokenizer, tmp_path):
    corpus = open_corpus([write_lines(tmp_path / "a.jsonl", TEXTS[:12])], tokenizer, 32, eval_rows=1)
    rows = read(corpus, 60)
    assert rows[-1][1]["epoch"] > 1
    held_out = next(n for n in range(1, 12) if len(ids_of(tokenizer, TEXTS[:n])) >= 31)
    texts = ids_of(tokenizer, TEXTS[held_out:12])
    stream = np.concatenate([row[1:] for row, _ in rows]).tolist()
    assert stream[len(texts) : 2 * len(texts)] == stream[: len(texts)] == texts
    seeds = [read(open_corpus(["python"], tokenizer, 32, seed=seed), 1)[0][0].tolist() for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_python_text_lacks_the_held_out_sentences(tokenizer):
    text = " ".join(" ".join(document.split()) for document in python_documents())
    assert not [sentence for sentence in prose.sentences("test") if sentence in text]
    assert prose.sentences("train")[0] in text
    corpus = open_corpus(["python"], tokenizer, 64, eval_rows=1)
    assert tokenizer.decode(corpus.held_out[0].tolist()).startswith(prose.text("test")[:40])


def test_text_to_hold_out_may_be_named(tokenizer, tmp_path):
    data, held = (
        write_lines(tmp_path / f"{name}.jsonl", part) for name, part in (("a", TEXTS[:30]), ("b", TEXTS[30:]))
    )
    corpus = open_corpus([data], tokenizer, 32, eval_names=[held], eval_rows=2)
    assert read(corpus, 1)[0][0][1:].tolist() == ids_of(tokenizer, TEXTS)[:31]
    assert corpus.held_out[:, 1:].ravel().tolist() == ids_of(tokenizer, TEXTS[30:])[: 2 * 31]


def test_a_published_text_is_trained_on_without_its_end(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="python -m papers texts debian king-james-bible"):
        open_corpus(["king-james-bible"], tokenizer, 32)
    file = texts.place("king-james-bible")
    file.parent.mkdir(parents=True)
    file.write_text("\n\n".join(f"Line {number} of the {'river ' * 300}" for number in range(40)))
    corpus = open_corpus(["king-james-bible"], tokenizer, 32, eval_rows=2)
    held_out = tokenizer.encode(texts.read_text("king-james-bible:held-out"), add_special_tokens=False)
    assert corpus.held_out[:, 1:].ravel().tolist() == held_out[: 2 * 31]  # after the rows' BOS
    training, unseen = texts.parts(file.read_text())
    assert "\n\n".join(training + unseen) == file.read_text()
    rows = corpus.rows(None)
    seen = np.concatenate([next(rows)[0] for _ in range(2 * len(tokenizer.encode("".join(training))) // 32)])
    assert "Line 0 of" in (text := tokenizer.decode(seen.tolist())) and "Line 39 of" not in text


def test_bad_lines_are_named_or_skipped_and_counted(tokenizer, tmp_path):
    good = [json.dumps({"text": text}).encode() for text in TEXTS]
    bad = [b"{broken", b'{"body": "no text"}', b'{"text": "\xff"}', b"[1]", b'{"text": "  "}']
    for line, what in zip(bad, ("not JSON", "no text in 'text'", "not UTF-8", "no text", "is empty"), strict=True):
        (tmp_path / "a.jsonl").write_bytes(b"\n".join([*good[:30], line, *good[30:]]))
        with pytest.raises(ValueError, match=rf"a\.jsonl, line 31: .*{what}"):
            read(open_corpus([str(tmp_path / "a.jsonl")], tokenizer, 32, eval_rows=1), 100)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*good[:30], *bad, b""]))
    (tmp_path / "c.jsonl").write_bytes(b"\n".join([*good[30:], *bad]))
    files = [str(tmp_path / name) for name in ("a.jsonl", "c.jsonl")]
    corpus = open_corpus(files, tokenizer, 32, eval_rows=1, skip_bad_lines=True)
    rows = read(corpus, 400)
    assert rows[-1][1]["epoch"] > 0 and rows[-1][1]["place"]["skipped"] == 10
    clean = open_corpus([write_lines(tmp_path / "b.jsonl", TEXTS)], tokenizer, 32, eval_rows=1)
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(rows, read(clean, 400), strict=True))


def test_another_field_may_hold_the_text(tokenizer, tmp_path):
    corpus = open_corpus([write_lines(tmp_path / "a.jsonl", TEXTS, "body")], tokenizer, 32, field="body", eval_rows=1)
    assert corpus.held_out[0, 1:].tolist() == ids_of(tokenizer, TEXTS)[:31]


def test_the_retriever_s_rows_are_asked_for_by_their_module(tokenizer, monkeypatch):
    monkeypatch.delitem(WRITTEN, "retriever")
    with pytest.raises(FileNotFoundError, match=r"or retriever with --import papers\.retriever\.rows\."):
        open_corpus(["retriever"], tokenizer, 32)


def test_a_data_set_needs_the_library(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FileNotFoundError, match="datasets is not installed"):
        open_corpus(["allenai/c4:realnewslike"], tokenizer, 32)


def test_a_data_set_streams_and_resumes(tokenizer, monkeypatch):
    class Entries(list):
        def skip(self, count):
            return self[count:]

    class Datasets:
        @staticmethod
        def load_dataset(path, config, split, streaming):
            assert (path, config, split, streaming) == ("owner/name", "small", "train", True)
            return Entries({"text": text} for text in TEXTS)

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    corpus = open_corpus(["owner/name:small"], tokenizer, 32, eval_rows=1)
    rows = read(corpus, 30)
    held_out = next(n for n in range(1, 60) if len(ids_of(tokenizer, TEXTS[:n])) >= 31)
    assert rows[0][0][1:].tolist() == ids_of(tokenizer, TEXTS[held_out:])[:31]
    assert np.array_equal(read(corpus, 1, rows[8][1])[0][0], rows[9][0])


def test_the_first_line_of_every_file_is_read_before_a_run_begins(tokenizer, tmp_path):
    good = write_lines(tmp_path / "a.jsonl", TEXTS)
    for name, content, said in (
        ("b.jsonl", b"\n{broken\n", r"b\.jsonl, line 2: this is not JSON"),
        ("c.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("d.jsonl.gz", b"no gzip", "is cut short or damaged"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=said):
            open_corpus([good, str(tmp_path / name)], tokenizer, 32, eval_rows=1)
