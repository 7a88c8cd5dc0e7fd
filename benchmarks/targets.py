"""TPU chips as compilation targets, on a machine without a TPU."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import jax

# With these, libtpu asks no metadata server, and lets other processes, such as test workers, load it, too.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@functools.cache
def tpu_chips(topology: str) -> tuple[Any, ...]:
    """Return the chips of a TPU topology, such as "v5e:2x4", to compile for and not to run on.

    Raises:
        ImportError: libtpu is not installed.
        ValueError: libtpu does not know the topology.
    """
    try:
        import libtpu  # type: ignore # noqa: F401
    except ImportError as error:
        raise ImportError("compiling for a TPU needs libtpu: pip install 'kvjax[tpu]' (no TPU is needed).") from error
    from jax.experimental import topologies

    for variable, value in _WITHOUT_TPU.items():
        os.environ.setdefault(variable, value)
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"unknown TPU topology {topology!r} ({reason}); give one such as v5e:2x4.") from error


def compiled(program: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a program for chips that are not at hand, without JAX's cache, which could not read it back."""
    setting = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, setting)
    jax.config.update(setting, math.inf)
    try:
        return program.compile()
    finally:
        jax.config.update(setting, before)
