"""Compiled programs of a long-lived process, which the system's limit of memory maps bounds."""

from __future__ import annotations

from pathlib import Path

import jax

from models import hosts

MOST_MAPS = 25_000  # of a process, before its programs are dropped; Linux allows 65,530 on most machines


def memory_maps() -> int:
    """Return the memory maps of this process, to which each compiled program adds; 0 where the system does not say."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.is_file() else 0


def make_room(most: int = MOST_MAPS) -> None:
    """Drop all compiled programs if this process has more than ``most`` memory maps; call it between two settings.

    Each program has maps of its own. Without this, some 130 sizes of whole runs end in "LLVM compilation error: Cannot
    allocate memory" and a crash. What is asked for again is compiled again, or read from the folder of compiled
    programs (``KVJAX_COMPILATION_CACHE``). All processes of a run call it together.
    """
    if hosts.from_first(lambda: memory_maps() > most):
        jax.clear_caches()
