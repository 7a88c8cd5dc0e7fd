"""Training text: documents from files, a hub data set or Python itself, as rows of token ids.

Documents come in a fixed order (files as given, a folder's files by name; texts in memory are shuffled again each epoch
by the seed). They are joined by the end token and cut into rows of exactly ``length`` ids. If the tokenizer puts a BOS
before every prompt, each row begins with one, too. The next row depends only on the position, a small dictionary that
JSON can hold: training that resumes opens the file at that place and tokenises one piece again.

Several sources take turns, one row each. Held-out rows never overlap with training: for a user's text they are the
first documents, and training begins after them; for `python` and the texts of `python -m papers texts` they are what
evals hold out, too.
"""

from __future__ import annotations

import codecs
import functools
import gzip
import importlib
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import zstandard
from jaxtyping import Int

from evals import prose, texts
from kvjax._src import install
from models.tokenizer import Tokenizer

BUILTIN = ("python", *texts.PUBLISHED)
SUFFIXES = (".txt", ".jsonl", ".json")  # .json holds JSON lines, too; each also packed as .gz or .zst
PIECE_BYTES = 1 << 14  # a .txt is tokenised in pieces of this size
SENTENCES_A_DOCUMENT = 24

Place = dict[str, int]
Position = dict[str, Any]
Rows = Callable[[Position | None], Iterator[tuple[Int[np.ndarray, "T"], Position]]]


class Piece(NamedTuple):
    """A document or a part of one: its text, whether the document ends with it, where to continue reading, and whether
    the document begins with it.
    """

    text: str
    ends: bool
    after: Place
    begins: bool = True


class Documents(NamedTuple):
    """Documents of one source.

    ``pieces(place, epoch)`` reads once from a place to the end; ``start`` is the first. ``held_out`` are documents that
    are never trained on; if there are none, the first ones are held out.
    """

    name: str
    start: Place
    pieces: Callable[[Place, int], Iterator[Piece]]
    held_out: Documents | None = None


class Written(Protocol):
    """Rows that are made as they are read, in place of documents; held-out rows are none of them."""

    @property
    def name(self) -> str: ...
    def rows(self, length: int, position: Position | None) -> Iterator[tuple[Int[np.ndarray, "T"], Position]]: ...
    def held_out(self, length: int, count: int) -> Int[np.ndarray, "R T"]: ...


# By the names that are data; a module of --import may add its own. Each is called with the tokenizer and the seed.
WRITTEN: dict[str, Callable[[Tokenizer, int], Written]] = {}


class Corpus(NamedTuple):
    """The text of a training run.

    ``rows(position)`` yields rows without end, each with the position after it; None starts from the beginning.
    ``held_out`` are rows that it never yields. ``name`` lists the names of its sources.
    """

    name: list[str]
    rows: Rows
    held_out: Int[np.ndarray, "R T"]


def open_corpus(
    names: Sequence[str],
    tokenizer: Tokenizer,
    length: int,
    *,
    eval_names: Sequence[str] = (),
    eval_rows: int = 16,
    field: str = "text",
    skip_bad_lines: bool = False,
    seed: int = 0,
) -> Corpus:
    """Return the training rows and held-out rows of all named sources.

    Args:
        names: files (.txt; .jsonl or .json with one JSON object per line; each also as .gz or .zst), folders of them, a
            hub data set ("allenai/c4:realnewslike"), "python" (the topics of Python's help, and our sentences),
            a text that `python -m papers texts` has made, one of :data:`WRITTEN`. Commas separate names, too. All files
            together are one source.
        length: the number of ids per row.
        eval_names: text to hold out, named likewise, instead of a part of ``names``.
        eval_rows: how many rows to hold out in total.
        field: the field of a JSON line that holds the text.
        skip_bad_lines: whether to leave out lines that are not UTF-8 or have no text; the position counts them.
        seed: the seed of the order of texts in memory.

    Raises:
        FileNotFoundError: a name is not a file, folder or data set.
        ValueError: a file cannot be read (the message says where), there is too little text, or the tokenizer has no
            end token.
    """
    if length < 2:
        raise ValueError(f"the sequence length is {length}; expected at least 2 tokens per row.")
    if eval_rows < 1:
        raise ValueError(f"{eval_rows} held-out rows were asked for; hold out at least 1.")
    encoder = _Encoder.of(tokenizer)
    sources = _sources(names, tokenizer, field, skip_bad_lines, seed)
    held_out = _sources(eval_names, tokenizer, field, skip_bad_lines, seed) if eval_names else sources
    each = -(-eval_rows // len(held_out))
    made: list[Rows] = []
    kept: list[np.ndarray] = []
    for source in sources:
        if isinstance(source, Documents):
            if not eval_names and source.held_out is None:
                rows, begin = _first_rows(source, encoder, length, each)
                kept.append(rows)
                source = source._replace(start=begin)
            made.append(functools.partial(_packed, source, encoder, length))
        else:
            made.append(functools.partial(source.rows, length))
    for source in held_out:
        if not isinstance(source, Documents):
            kept.append(source.held_out(length, each))
        elif source.held_out is not None:
            kept.append(_first_rows(source.held_out, encoder, length, each)[0])
        elif eval_names:
            kept.append(_first_rows(source, encoder, length, each)[0])
    read = made[0] if len(made) == 1 else functools.partial(_in_turns, made)
    return Corpus([source.name for source in sources], read, np.concatenate(kept))


class _Encoder(NamedTuple):
    tokenizer: Tokenizer
    end: int
    before: list[int]  # the ids that each row begins with

    def ids(self, piece: Piece) -> list[int]:
        """Return the ids of a piece, with the end token if its document ends."""
        text, ends, _, begins = piece
        ids = self.tokenizer.encode(text, add_special_tokens=False) if begins else self.tokenizer.continuation(text)
        return [*ids, self.end] if ends else ids

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Encoder:
        if tokenizer.eos is None:
            raise ValueError("the tokenizer names no eos_token to join documents by; name it in tokenizer_config.json.")
        first = tokenizer.encode("a")[:1]
        before = first if first == [tokenizer.bos] else []
        return cls(tokenizer, tokenizer.eos, before)


def _packed(
    source: Documents, encoder: _Encoder, length: int, position: Position | None
) -> Iterator[tuple[np.ndarray, Position]]:
    """Yield rows without end: the ids of one document after the other, with an end token after each."""
    position = position or {"epoch": 0, "place": source.start, "skip": 0}
    epoch, place, skip = position["epoch"], position["place"], position["skip"]
    held: list[int] = []
    size = length - len(encoder.before)
    while True:
        read, whole = 0, source.start.items() - {("skipped", 0)} <= place.items()
        for piece in source.pieces(place, epoch):
            ids, used, after = encoder.ids(piece)[skip:], skip, piece.after
            skip, read = 0, read + len(ids)
            while len(held) + len(ids) >= size:
                taken = size - len(held)
                used += taken
                row = np.array([*encoder.before, *held, *ids[:taken]], np.int32)
                ids, held = ids[taken:], []
                yield row, {"epoch": epoch} | ({"place": place, "skip": used} if ids else {"place": after, "skip": 0})
            held += ids
            place = after
        if read == 0 and whole:
            raise ValueError(
                f"{source.name} holds no text after what is held out; give more, or fewer --eval-rows, or --eval-data."
            )
        counted = {name: count for name, count in place.items() if name == "skipped"}
        epoch, place = epoch + 1, source.start | counted


def _first_rows(source: Documents, encoder: _Encoder, length: int, count: int) -> tuple[np.ndarray, Place]:
    """Return rows of the first documents, fewer than ``count`` if the text is short, and the place after them."""
    size = length - len(encoder.before)
    held: list[int] = []
    place = source.start
    for piece in source.pieces(source.start, 0):
        held += encoder.ids(piece)
        place = piece.after
        if len(held) >= count * size:
            break
    count = min(count, len(held) // size)
    if count == 0:
        raise ValueError(
            f"{source.name} holds {len(held)} tokens, which is less than one held-out row of {length}; give more text, "
            "or a smaller --seq-len."
        )
    rows = np.array(held[: count * size], np.int32).reshape(count, size)
    before = np.tile(np.array(encoder.before, np.int32), (count, 1))
    return np.concatenate([before, rows], axis=1), place


def _in_turns(sources: Sequence[Rows], position: Position | None) -> Iterator[tuple[np.ndarray, Position]]:
    position = position or {"turn": 0, "parts": [None] * len(sources)}
    turn, parts = position["turn"], list(position["parts"])
    running = [rows(part) for rows, part in zip(sources, parts, strict=True)]
    while True:
        row, parts[turn] = next(running[turn])
        turn = (turn + 1) % len(sources)
        yield row, {"turn": turn, "parts": list(parts)}


def _sources(
    names: Sequence[str], tokenizer: Tokenizer, field: str, skip_bad_lines: bool, seed: int
) -> list[Documents | Written]:
    named = [part.strip() for name in names for part in ([name] if Path(name).exists() else name.split(","))]
    named = [name for name in named if name]
    if not named:
        raise ValueError(f"no data was named; give files, folders, a hub data set, or one of {_names()}.")
    own = (*BUILTIN, *WRITTEN)
    files = [file for name in named if name not in own and not _is_hub_name(name) for file in files_of(name)]
    out: list[Documents | Written] = []
    for name in dict.fromkeys(named):
        if name == "python":
            out.append(_python_text(seed))
        elif name in WRITTEN:
            out.append(WRITTEN[name](tokenizer, seed))
        elif name in texts.PUBLISHED:
            out.append(_published_text(name, seed))
        elif _is_hub_name(name):
            out.append(_hub_data_set(name, field, skip_bad_lines))
        elif files:
            out.append(_file_documents(files, field, skip_bad_lines))
            files = []
    return out


def _names() -> str:
    """Return the names that are data, as an error's message has them."""
    told = ", ".join((*BUILTIN, *WRITTEN))
    return told if "retriever" in WRITTEN else f"{told}, or retriever with --import papers.retriever.rows"


def _is_hub_name(name: str) -> bool:
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", name)) and not (
        Path(name).exists() or Path(name).parent.exists() or _kind(Path(name))[0]
    )


# Files.


def _kind(path: Path) -> tuple[str, str]:
    """Return the suffix of a file and its packing; the suffix is empty if the file cannot be read."""
    packing = path.suffix if path.suffix in (".gz", ".zst") else ""
    suffix = Path(path.stem).suffix if packing else path.suffix
    return suffix if suffix in SUFFIXES else "", packing


def files_of(name: str) -> list[Path]:
    """Return the files of text that a name stands for: itself, or all that a folder holds, by name.

    Raises:
        FileNotFoundError, ValueError: there are none, or a file is empty or of an unknown kind.
    """
    path = Path(os.path.expanduser(name))  # unlike Path.expanduser, this leaves an unknown user's name
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file)[0])
        if not files:
            raise FileNotFoundError(f"the folder {path} holds no {', '.join(SUFFIXES)} file (or .gz, .zst of them).")
    elif path.is_file():
        if not _kind(path)[0]:
            raise ValueError(f"{path} is of an unknown kind; expected {', '.join(SUFFIXES)}, or .gz or .zst of them.")
        files = [path]
    else:
        raise FileNotFoundError(
            f"there is no data file {name}; give a file, a folder, a hub data set (owner/name), or one of {_names()}."
        )
    for file in files:
        if file.stat().st_size == 0:
            raise ValueError(f"{file} is empty; give a file with text.")
    return files


def _file_documents(files: Sequence[Path], field: str, skip_bad_lines: bool) -> Documents:
    def pieces(place: Place, epoch: int) -> Iterator[Piece]:
        for index in range(place["file"], len(files)):
            file, after, found = files[index], place, place["offset"] > 0
            plain = _kind(file)[0] == ".txt"
            read = _text_pieces(file, place) if plain else _lines(file, place, field, skip_bad_lines, epoch)
            for piece in read:
                if plain and piece.ends:  # nothing is left of this file, not even an end
                    piece = piece._replace(after=piece.after | {"file": index + 1, "offset": 0, "line": 0})
                text, after = piece.text, piece.after
                found |= bool(text.strip())
                yield (
                    piece if text.strip() else piece._replace(text="")
                )  # empty, so that skipped lines are counted, too
            if not found:
                raise ValueError(f"{file} holds no text; give a file with text.")
            place = {"file": index + 1, "offset": 0, "line": 0, "skipped": after["skipped"]}

    start = {"file": 0, "offset": 0, "line": 0, "skipped": 0}
    for file in files:  # else a run would find out hours later that its last file is none that it can read
        read = _text_pieces(file, start) if _kind(file)[0] == ".txt" else _lines(file, start, field, skip_bad_lines, 0)
        next((piece for piece in read if piece.text.strip()), None)
    name = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    sizes = zlib.crc32(json.dumps([[file.name, file.stat().st_size] for file in files]).encode())
    return Documents(f"{name} [{sizes:08x}]", start, pieces)


def open_file(file: Path) -> IO[bytes]:
    """Open a file's bytes, unpacked if its name ends in .gz or .zst."""
    _, packing = _kind(file)
    if packing == ".gz":
        return io.BufferedReader(gzip.open(file, "rb"))
    if packing == ".zst":
        return io.BufferedReader(zstandard.open(file, "rb"))
    return file.open("rb")


def _stream(file: Path, offset: int, read: Callable[[IO[bytes]], Iterator[Piece]]) -> Iterator[Piece]:
    """Read a file from an offset in the unpacked bytes; an error of unpacking becomes a ValueError."""
    with open_file(file) as stream:
        try:
            if _kind(file)[1]:
                while offset > 0 and (skipped := len(stream.read(min(offset, 1 << 20)))):
                    offset -= skipped
            else:
                stream.seek(offset)
            yield from read(stream)
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise ValueError(f"{file} is cut short or damaged ({error}); copy it again.") from None


def _lines(file: Path, place: Place, field: str, skip_bad_lines: bool, epoch: int) -> Iterator[Piece]:
    def read(stream: IO[bytes]) -> Iterator[Piece]:
        offset, number, skipped = place["offset"], place["line"], place["skipped"]
        while line := stream.readline():
            offset, number = offset + len(line), number + 1
            text, wrong = _text_of(line, field)
            if wrong and not skip_bad_lines:
                raise ValueError(
                    f"{file}, line {number}: {wrong}; fix it, name another --text-field, or pass --skip-bad-lines."
                )
            skipped += bool(wrong) and epoch == 0
            after = place | {"offset": offset, "line": number, "skipped": skipped}
            yield Piece("", False, after) if text is None else Piece(text, True, after)

    return _stream(file, place["offset"], read)


def _text_of(line: bytes, field: str) -> tuple[str | None, str]:
    """Return the text of a JSON line, and what is wrong with it; for an empty line, None and ""."""
    if not line.strip():
        return None, ""
    try:
        entry = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return None, f"byte {error.start} is not UTF-8"
    except (ValueError, RecursionError):
        return None, "this is not JSON"
    text = entry.get(field) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        return None, f"it has no text in {field!r}"
    return (text, "") if text.strip() else (None, f"the text in {field!r} is empty")


def _text_pieces(file: Path, place: Place) -> Iterator[Piece]:
    def read(stream: IO[bytes]) -> Iterator[Piece]:
        offset, rest = place["offset"], b""
        while True:
            begins = offset == 0
            block = rest + stream.read(PIECE_BYTES) + stream.readline(PIECE_BYTES)
            ends = len(block) - len(rest) < PIECE_BYTES
            decoder = codecs.getincrementaldecoder("utf-8")()
            try:
                text = decoder.decode(block, final=ends)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text (byte {offset + error.start}); convert it first.") from None
            rest = decoder.getstate()[0]
            offset += len(block) - len(rest)
            yield Piece(text, ends, place | {"offset": offset}, begins)
            if ends:
                return

    return _stream(file, place["offset"], read)


def _hub_data_set(name: str, field: str, skip_bad_lines: bool) -> Documents:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise FileNotFoundError(
            f"there is no data file {name}, and it is not looked for on the hub: {install.needed(['datasets'], 'data')}"
        ) from None
    path, _, config = name.partition(":")
    try:
        entries = datasets.load_dataset(path, config or None, split="train", streaming=True)
    except Exception as error:  # the hub's, the client's and the disk's errors have no common base
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise FileNotFoundError(
            f"downloading the data set {name} from the Hugging Face hub failed ({type(error).__name__}: {reason}); "
            "check the name and the network."
        ) from None

    def pieces(place: Place, epoch: int) -> Iterator[Piece]:
        skipped = place["skipped"]
        for number, entry in enumerate(entries.skip(place["line"]), place["line"] + 1):
            text = entry.get(field)
            bad = not isinstance(text, str) or not text.strip()
            if bad and not skip_bad_lines:
                raise ValueError(
                    f"{name}, entry {number}: it has no text in {field!r}; name another --text-field, or pass "
                    "--skip-bad-lines."
                )
            skipped += bad and epoch == 0
            yield Piece("" if bad else text, not bad, place | {"line": number, "skipped": skipped})

    return Documents(name, {"line": 0, "skipped": 0}, pieces)


# Text that needs no download.


def _in_memory(name: str, documents: Sequence[str], seed: int | None, held_out: Documents | None = None) -> Documents:
    def pieces(place: Place, epoch: int) -> Iterator[Piece]:
        order: Any = range(len(documents))
        if seed is not None:
            order = np.random.default_rng([seed, epoch]).permutation(len(documents))
        for index in range(place["document"], len(documents)):
            yield Piece(documents[order[index]], True, place | {"document": index + 1})

    return Documents(name, {"document": 0}, pieces, held_out)


@functools.cache
def python_documents() -> tuple[str, ...]:
    """Return the documents of `python`: the topics of Python's help, and the haystack's sentences for training."""
    from pydoc_data import topics

    documents = [topic for _, topic in sorted(topics.topics.items())]
    drawn = prose.draw(np.random.default_rng(0), "train")  # in the file's order, near copies are neighbours
    sentences = list(itertools.islice(drawn, len(prose.sentences("train"))))
    for start in range(0, len(sentences), SENTENCES_A_DOCUMENT):
        documents.append(" ".join(sentences[start : start + SENTENCES_A_DOCUMENT]))
    return tuple(documents)


def _python_text(seed: int) -> Documents:
    held_out = _in_memory("the held-out sentences", [prose.text("test")], None)
    return _in_memory("python", python_documents(), seed, held_out)


def _published_text(name: str, seed: int) -> Documents:
    text = texts.read_text(name)
    training, held_out = texts.parts(text)
    return _in_memory(f"{name} [{texts.digest(text)[:8]}]", training, seed, _in_memory(name, held_out, None))
