"""Registries: things by short name, built in, added by a program, or found in an installed package.

A package offers a thing under a name by an entry point in its pyproject.toml::

    [project.entry-points."kvjax.policies"]
    vatp = "kvjax_vatp:vatp"

Nothing of the package is imported before somebody asks for that name. A name has one source: where a second one offers
it, it is refused.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any


class Registry[Thing](Mapping[str, Thing]):
    """Things by short name. As a mapping it has built-in and added ones; :meth:`find` also asks installed packages.

    Args:
        kind: what the things are, for messages: "policy".
        group: the entry-point group of other packages' things; None if they have none.
        prepare: ``prepare(name, thing)`` checks a thing and returns what is kept of it.
        built_in: modules that add things when they are imported, which they are before anybody looks.
    """

    def __init__(
        self,
        kind: str,
        group: str | None,
        prepare: Callable[[str, Any], Thing] = lambda name, thing: thing,
        built_in: tuple[str, ...] = (),
    ) -> None:
        self.kind, self.group, self.prepare, self.built_in = kind, group, prepare, built_in
        self.added: dict[str, Thing] = {}
        self.sources: dict[str, str] = {}

    def _known(self) -> dict[str, Thing]:
        for module in self.built_in:
            importlib.import_module(module)
        return self.added

    def __getitem__(self, name: str) -> Thing:
        return self._known()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def add(self, name: str, thing: Any, *, source: str) -> Thing:
        """Add a thing of a module, and return what is kept of it.

        The same module may add it again, as a notebook does when a cell runs twice.
        """
        if source not in self.built_in:
            self._known()
        if self.sources.get(name, source) != source:
            raise self._twice(name, self.sources[name], source)
        self.added[name] = self.prepare(name, thing)
        self.sources[name] = source
        return self.added[name]

    def find(self, name: str) -> Thing | None:
        """Return the thing of this name, imported from another package if need be; None if there is none."""
        known = [self.sources[name]] if name in self else []
        entries = [entry for entry in _entries(self.group) if entry.name == name and not _is_of(entry, known)]
        if len(offers := [*known, *map(_package, entries)]) > 1:
            raise self._twice(name, *offers[:2])
        for entry in entries:
            self._import(name, entry)
        return self.get(name)

    def names(self) -> list[str]:
        """Return all names, sorted, those of installed packages included; nothing is imported."""
        return sorted({*self, *(entry.name for entry in _entries(self.group))})

    def package(self, name: str) -> str | None:
        """Return the installed package that offers a name, with its version; None if none does."""
        return next((_package(entry) for entry in _entries(self.group) if entry.name == name), None)

    def _import(self, name: str, entry: EntryPoint) -> None:
        """Add the thing that another package offers."""
        try:
            thing = entry.load()
        except Exception as error:  # whatever a stranger's module raises
            raise ImportError(
                f"the {self.kind} {name!r} is from {_package(entry)}, whose {entry.value!r} cannot be imported "
                f"({type(error).__name__}: {error}); update or uninstall that package."
            ) from error
        if name not in self:  # the module itself may have added it
            try:
                self.add(name, thing, source=entry.module)
            except ValueError as error:
                raise ValueError(f"{_package(entry)} offers no {self.kind}: {error}") from None

    def _twice(self, name: str, *places: str) -> ValueError:
        first, second = (place.partition("._src")[0] for place in places)  # what users can import
        return ValueError(f"the {self.kind} {name!r} is in {first} and in {second}; rename it in one of them.")


def _entries(group: str | None) -> tuple[EntryPoint, ...]:
    return () if group is None else _installed(group, tuple(sys.path))


@functools.cache
def _installed(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))  # reads the metadata of all packages, so once for each sys.path


def _is_of(entry: EntryPoint, sources: list[str]) -> bool:
    """Return whether an entry point is of the package that a source is a module of."""
    return any(entry.module.split(".")[0] == source.split(".")[0] for source in sources)


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
