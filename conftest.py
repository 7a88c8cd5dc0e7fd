"""What every test and every docstring example runs under. pytest reads it before anything imports jax."""

import gc
import os
import sys

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before conftest.py could set XLA_FLAGS: find the plugin that imports it")


def _add_flag(name: str, value: object) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()


os.environ.setdefault("JAX_PLATFORMS", "cpu")
_add_flag("xla_force_host_platform_device_count", 8)  # eight devices on one machine, for the tests of sharding
if os.environ["JAX_PLATFORMS"] == "cpu":  # tests compile a lot and compute little: half the time
    _add_flag("xla_backend_optimization_level", 0)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores: no thread pool inside each
    _add_flag("xla_cpu_multi_thread_eigen", "false")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Workers share what they compile, however small: what is called outside jit is a program an operation, and reading one
# takes a quarter of compiling it. A module finds again what clear_caches dropped, and so does a second run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

os.environ.setdefault("KVJAX_COMPILATION_CACHE", "off")  # commands keep nothing in the user's folder

import hypothesis  # noqa: E402
import jaxtyping  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

pytest_plugins = ["tests.costs"]

# The same examples on every run and machine. `pytest --hypothesis-profile=thorough` searches further, at random.
hypothesis.settings.register_profile("default", derandomize=True, deadline=None, max_examples=30)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("default")

# `python -m models.ask` and its like run these, and there is no more to them.
collect_ignore = [f"models/{name}.py" for name in ("ask", "batch", "calibrate", "chat", "generate", "get")]

# Shapes and dtypes that the library's arithmetic declares are checked at each call. A test that passes wrong ones on
# purpose, to see the function's own message, is marked bad_input: there the annotations stay silent.
jaxtyping.Array = jaxtyping.Array | np.ndarray | np.generic  # public functions take NumPy's, too
_TYPED = "eviction_error quantise rotary scores scores_of_keys selection topk compact_positions"
_CHECK = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"  # an int is a float
jaxtyping.install_import_hook(["kvjax.allocation", *(f"kvjax._src.{module}" for module in _TYPED.split())], _CHECK)


@pytest.fixture(autouse=True)
def _annotations_are_silent_for_bad_input(request):
    silent = request.node.get_closest_marker("bad_input") is not None
    jaxtyping.config.update("jaxtyping_disable", silent)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Put the papers' experiments into the matrix, their docstrings' examples included."""
    for item in items:
        if item.nodeid.startswith(("papers/", "tests/papers/")):
            item.add_marker(pytest.mark.matrix)


def pytest_collection_finish(session):
    """Keep what was imported and collected out of every later search for garbage: about 4% of the tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _names_that_a_test_registers_end_with_it():
    from kvjax._src.chains import LINKS
    from kvjax.allocation import ALLOCATIONS
    from kvjax.sources import SOURCES
    from models.families import FAMILIES

    registries = (LINKS, ALLOCATIONS, SOURCES, FAMILIES)
    before = [(dict(registry), dict(registry.sources)) for registry in registries]
    yield
    for registry, (things, sources) in zip(registries, before, strict=True):
        registry.added, registry.sources = things, sources
