"""A folder of results, from which a killed run is resumed.

    header.json     what was run: the evaluation, its settings, the command, device and versions, and fingerprints of
                    weights, tokenizer and data
    samples.jsonl   one line per sample, written batch by batch; a line that was cut off is dropped when a run resumes

A folder is for one set of settings, and for one model's weights, tokenizer and data. Others are refused with an error
that names what differs. Lists of what each record names, such as a sweep's models and policies, may grow, and so may
the number of samples that come ``first``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kvjax._src.former_names import is_former, renamed_document, version_of
from models import files, hosts
from models.commands import provenance

HEADER, SAMPLES = "header.json", "samples.jsonl"
SETTING = ("model", "evaluation", "length", "policy", "budget", "when", "question")
KEY = (*SETTING, "task", "sample")
# Settings that may change when a run is resumed: where it writes, what it runs on, and what is compared.
FREE = ("name", "invocation", "out", "json", "plot", "batch", "mesh", "against")
GROWING = ("models", "policies", "budgets", "when", "question", "allocations")  # settings that each record names


class Results:
    """The records of a run, in a folder if one is named; a context manager that holds the folder's lock.

    Of several processes that run together, the first one alone reads and writes the folder.

    Args:
        folder: made if it does not exist; None keeps the records in memory only.
        settings: all settings that decide the figures, in JSON's types.
        command: the command line that makes the records.

    Attributes:
        environments: the devices, versions and commits that made the ``records``.
        fingerprints: what they are made of, as noted by :meth:`check_digests`.

    Raises:
        ValueError: the folder holds something else, other settings or a damaged file, or another run writes into it.
    """

    def __init__(self, folder: str | Path | None, evaluation: str, settings: Mapping[str, Any], command: str) -> None:
        self.records: list[dict[str, Any]] = []
        self._file: Any = None
        self._folder = Path(folder) if folder is not None and hosts.first() else None
        # In the form in which the header is read again: JSON turns tuples into lists.
        self._wanted = json.loads(json.dumps({"evaluation": evaluation, "settings": dict(settings)}))
        self._command = command
        self._header: dict[str, Any] = {}
        self.fingerprints: list[dict[str, Any]] = []
        self.environments: list[dict[str, Any]] = []
        self._noted = False
        self._keys: set[tuple[Any, ...]] = set()

    def __enter__(self) -> Results:
        if self._folder is not None:
            self._open(self._folder)
        first = hosts.from_first(lambda: [self.records, self.fingerprints, self.environments])
        self.records, self.fingerprints, self.environments = first
        self._keys = {_key(record) for record in self.records}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def holds(self, record: Mapping[str, Any]) -> bool:
        """Return whether this sample has been answered under this setting."""
        return _key(record) in self._keys

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Add new records, and write them to disk before returning."""
        new = [record for record in records if not self.holds(record)]
        if new and not self._noted:
            self._noted = True
            if (here := provenance.environment()) not in self.environments:
                self.environments.append(here)
                self._write_header()
        if self._file is not None:
            self._file.write("".join(json.dumps(record, allow_nan=False) + "\n" for record in new).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        self.records += new
        self._keys |= {_key(record) for record in new}

    def check_digests(
        self, labels: Mapping[str, str], digests: Mapping[str, str], networks: Collection[str] = ()
    ) -> None:
        """Note what the records with these labels are made of, or check that it is the same as before.

        ``labels`` are fields that those records share, such as the model's name; ``digests`` are those of
        :func:`evals.evaluator.digests`. Those of ``networks`` may be new: of policies that a resumed run has added.

        Raises:
            ValueError: the folder's records were made of something else, or have no fingerprints.
        """
        there = next((known["made of"] for known in self.fingerprints if known["labels"] == dict(labels)), None)
        if there is not None or any(labels.items() <= record.items() for record in self.records):
            new = {name: digests[name] for name in networks if there and name not in there}
            provenance.check_same(Path(self._folder or ""), there and {**there, **new}, digests)
            if there and new:
                there.update(new)
                self._write_header()
            return
        self.fingerprints.append({"labels": dict(labels), "made of": dict(digests)})
        self._write_header()

    def check(self) -> dict[str, Any]:
        """Check that the folder can be written to or resumed, before the long work starts, and return its header."""
        folder = self._folder
        if folder is not None:
            files.check_folder(folder)
        if folder is not None and (folder / HEADER).exists():
            header = _header_of(folder)
            if is_former(version_of(header)):
                raise ValueError(f"{folder} is of a kvjax that gave policies other names; name another folder.")
            _check_same(folder, header, self._wanted)
            return header | self._wanted
        if folder is not None and folder.exists() and any(file.name[0] != "." for file in folder.iterdir()):
            raise ValueError(f"{folder} is not empty, and holds no {HEADER}; name a new folder, or one of results.")
        return {**self._wanted, "command": self._command, "environments": []}

    def _open(self, folder: Path) -> None:
        header = self.check()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / HEADER).exists():  # before any other file, so that a run killed here can resume
            files.write_json(folder / HEADER, header)
        self._file = (folder / SAMPLES).open("ab")
        files.lock(self._file, folder)
        header = self.check()  # again: a run that held the lock until now may have written to it
        self.records, whole = _read(folder / SAMPLES)
        self._file.truncate(whole)
        if header != _header_of(folder):
            files.write_json(folder / HEADER, header)
        self._header, self.fingerprints = header, header.get("fingerprints", [])
        self.environments = header["environments"]

    def _write_header(self) -> None:
        if self._folder is not None:
            noted = {"environments": self.environments, "fingerprints": self.fingerprints}
            files.write_json(self._folder / HEADER, {**self._header, **noted})


def read_header(folder: Path) -> dict[str, Any]:
    """Read the header of a folder of results, with today's names of policies.

    Raises:
        ValueError: there is no header, or it is damaged.
    """
    return dict(renamed_document(_header_of(folder)))


def _header_of(folder: Path) -> dict[str, Any]:
    path = Path(folder) / HEADER
    if not path.is_file():
        raise ValueError(f"{folder} is no folder of results: it has no {HEADER}; name one that --out or sweep made.")
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        known = all(isinstance(header[name], dict | str) for name in ("evaluation", "settings", "command"))
        known = known and isinstance(header["environments"], list)
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError(f"{path} is damaged; name another folder, or remove this one.")
    return header


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Read the records of a folder, without a last line that was cut off; ValueError if another is damaged.

    Policies that a kvjax before 0.3.0 named have the names of today, as in :func:`read_header`.
    """
    path = Path(folder) / SAMPLES
    records = _read(path)[0] if path.exists() else []
    return list(renamed_document(records, version_of(_header_of(folder)))) if records else []


def fingerprint(path: Path) -> str | None:
    """Return a digest of a file's bytes, or of the names and bytes of a folder's .json and .jsonl files, or None."""
    digest = hashlib.sha256()
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in (".json", ".jsonl"))
    elif path.is_file():
        found = [path]
    else:
        return os.urandom(8).hex() if path.exists() else None  # a pipe's text is no other run's
    for file in found:
        digest.update(file.name.encode() if path.is_dir() else b"")
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in KEY)


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a file, and how many of its bytes are whole lines."""
    records: list[dict[str, Any]] = []
    whole = 0
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # after the last newline comes nothing, or a line that was cut off
        try:
            record = json.loads(line)
            known = isinstance(record["task"], str) and isinstance(record["sample"], int)
            known = known and isinstance(record["score"], int | float)
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ValueError(f"{path} is damaged at line {number}; remove that line, or name another folder.") from None
        records.append(record)
        whole += len(line) + 1
    return records, whole


def _check_same(folder: Path, header: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if header["evaluation"] != wanted["evaluation"]:
        raise ValueError(
            f"{folder} holds results of {header['evaluation']!r}, not of {wanted['evaluation']!r}; name another folder."
        )
    old, new = header["settings"], wanted["settings"]
    differing = [
        f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
        for name in sorted({*old, *new})
        if name not in FREE and old.get(name) != new.get(name) and not _grows(name, old.get(name), new.get(name))
    ]
    if differing:
        raise ValueError(
            f"{folder} holds results of other settings ({'; '.join(differing)}); give the same, or name another folder."
        )


def _grows(name: str, old: Any, new: Any) -> bool:
    """Return whether a setting only adds records: a list has all of another's entries, or more samples come first."""
    if name == "first":
        return isinstance(old, int) and (new is None or new >= old)
    return name in GROWING and isinstance(old, list) and isinstance(new, list) and all(entry in new for entry in old)
