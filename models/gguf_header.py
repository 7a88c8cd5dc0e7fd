"""The header of a GGUF file: its metadata and where its tensors are.

It is read here: the package gguf takes 2 s for a vocabulary of 49,152 tokens, thirty times as long, and does not end on
a list with a damaged length.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kvjax._src.checks import shown

VERSIONS = (2, 3)
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<?", 10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
TEXT, ARRAY = 8, 9
UNSIGNED_32, UNSIGNED_64 = SCALARS[4], SCALARS[10]
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list"}


class Stored(NamedTuple):
    """A tensor's entry in the header: its shape (as in numpy), the number of its type, and where its data begin."""

    shape: tuple[int, ...]
    type: int
    offset: int


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Read all keys with their values, and all tensors with their places in the file."""
    with file.open("rb") as stream:
        reader = _Reader(file, stream)
        magic = reader.take(4)
        if magic != b"GGUF":
            raise ValueError(f"{file} is no GGUF file: it begins with {magic!r}, not with b'GGUF'; download it again.")
        version = reader.number(UNSIGNED_32)
        if version % (1 << 16) == 0:
            raise ValueError(f"{file} is a big-endian GGUF file; only little-endian ones are read: convert it again.")
        if version not in VERSIONS:
            raise ValueError(
                f"{file} is of GGUF version {version}; expected {VERSIONS[0]} or {VERSIONS[1]}: take "
                f"{'a newer kvjax' if version > max(VERSIONS) else 'a file that was converted later'}."
            )
        tensors, keys = reader.number(UNSIGNED_64), reader.number(UNSIGNED_64)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = reader.text()
            if key in metadata:
                raise reader.damaged(f"the key {key[:60]!r} is there twice")
            metadata[key] = reader.value(reader.number(UNSIGNED_32))
        stored: dict[str, Stored] = {}
        for _ in range(tensors):
            name = reader.text()
            if name in stored:
                raise reader.damaged(f"the tensor {name[:60]!r} is there twice")
            axes = reader.number(UNSIGNED_32)
            if not 1 <= axes <= 4:
                raise reader.damaged(f"the tensor {name[:60]!r} has {axes} axes")
            shape = tuple(reader.number(UNSIGNED_64) for _ in range(axes))[::-1]
            stored[name] = Stored(shape, reader.number(UNSIGNED_32), reader.number(UNSIGNED_64))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise reader.damaged(f"general.alignment is {shown(alignment)}")
        data = -(-stream.tell() // alignment) * alignment
    return metadata, {name: tensor._replace(offset=data + tensor.offset) for name, tensor in stored.items()}


class _Reader:
    """Numbers and texts from a stream that may end too early."""

    def __init__(self, file: Path, stream: BinaryIO):
        self.file, self.stream = file, stream
        self.size = os.fstat(stream.fileno()).st_size

    def take(self, count: int) -> bytes:
        if count > self.size:  # a damaged length must not allocate that much memory
            raise truncated(self.file)
        found = self.stream.read(count)
        if len(found) < count:
            raise truncated(self.file)
        return found

    def number(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def text(self) -> str:
        length = int.from_bytes(self.take(8), "little")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.damaged("a text in its header is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise self.damaged(f"a value is of the unknown type {kind}")
        inner, count = self.number(UNSIGNED_32), self.number(UNSIGNED_64)
        if inner == TEXT:
            return [self.text() for _ in range(count)]
        if inner not in SCALARS:
            raise self.damaged(f"a list is of the unknown type {inner}")
        dtype = np.dtype(SCALARS[inner])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.file} is damaged: {what}; download it again.")


def truncated(file: Path) -> ValueError:
    return ValueError(f"{file} is truncated: it ends within what its header promises; download it again.")


def optional(metadata: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """Return the value of a key, or the default if it is missing."""
    value = metadata.get(key)
    if value is None:
        return default
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"its key {key} is {shown(value)}; expected {WORDS[kind]}. Convert the model again.")
    return value


def needed(metadata: Mapping[str, Any], key: str) -> Any:
    if metadata.get(key) is None:
        raise ValueError(f"it lacks the key {key}; is it a language model's? Convert the model again.")
    return metadata[key]


def listed(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """Return a list of values of one kind, [] if the key is missing."""
    values = optional(metadata, key, list, [])
    if values and type(values[0]) is not kind:  # a file's lists hold values of one type
        raise ValueError(f"its key {key} is a list whose items are not each {WORDS[kind]}. Convert the model again.")
    return values
