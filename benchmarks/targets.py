"""TPU chips and a GPU as compilation targets, on a machine without them."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import jax

from kvjax._src import install

# With these, libtpu asks no metadata server, and lets other processes, such as test workers, load it, too.
_WITHOUT_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@functools.cache
def tpu_chips(topology: str) -> tuple[Any, ...]:
    """Return the chips of a TPU topology, such as "v5e:2x4", to compile for and not to run on."""
    try:
        import libtpu  # type: ignore # noqa: F401
    except ImportError as error:
        raise ImportError(f"compiling for a TPU needs no TPU, but {install.needed(['libtpu'], 'tpu')}") from error
    from jax.experimental import topologies

    for variable, value in _WITHOUT_TPU.items():
        os.environ.setdefault(variable, value)
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"unknown TPU topology {topology!r} ({reason}); give one such as v5e:2x4.") from error


# What XLA's compiler must know of an H100; it would read the rest from the device.
_H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84929347584
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@functools.cache
def gpu_chip() -> Any:
    """Return an H100 to compile for and not to run on."""
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="cuda", target_config=_H100, topology="1x1x1").devices[0]
    except NotImplementedError as error:
        needed = install.needed(["JAX's plugin for CUDA"], "cuda")
        raise ImportError(f"compiling for a GPU needs no GPU, but {needed}") from error


def executable(program: jax.stages.Lowered, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
    """Compile a program for chips that are not at hand, without JAX's cache, which could not read it back."""
    setting = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, setting)
    jax.config.update(setting, math.inf)
    try:
        return program.compile(options)
    finally:
        jax.config.update(setting, before)
