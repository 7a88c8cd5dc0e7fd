"""Arrays, numbers and names that no function can use: each is refused in one sentence of ours."""

# ruff: noqa: F401  calls.txt names what is imported

import dataclasses
import functools
import struct
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from jax.sharding import Mesh
from safetensors.numpy import save_file

import kernels_pallas
import kvjax
import models
from benchmarks import measure, steps
from benchmarks.shapes import SHAPES
from evals import best_tokens, claims, infinitebench, ruler, simulator, tasks
from kvjax._src.calibration import read_array
from kvjax._src.policy_checks import check_measured
from models import asking, commands
from models.commands import provenance
from models.config_json import to_hugging_face
from tests.bad_input.campaign import calls, refused
from tests.kvjax import blocks
from tests.kvjax import test_attend_arguments as room
from tests.kvjax import test_cache_file as cache_files
from tests.kvjax import test_caote as caotes
from tests.kvjax import test_checks as checks
from tests.kvjax import test_split_cache as meshes
from tests.models import reference, tiny
from tests.models import test_kvgrad as kvgrads
from tests.models.commands import test_chat as asked
from tests.models.make_golden import GOLDEN
from tests.models.test_butler import CONFIG as BUTLER
from tests.models.test_butler import a_butler
from tests.models.test_config import MIXED, of, read
from train import scorer

pytestmark = pytest.mark.bad_input

NAN = float("nan")
SIZES = dict(batch=1, kv_heads=2, slots=8, head_dim=4)
PAGES = dict(batch=1, kv_heads=1, pages=1, page_size=1, most=1, head_dim=1)
FOUR = dict(kv_heads=2, query_heads=4, head_dim=4, budget=2, block=2)
BYTES = dict(layers=2, kv_heads=2, head_dim=4, budget=8)
MADE = dict(policy="tova", batch=2, kv_heads=2, query_heads=4, head_dim=4, budget=6, block=4, page_size=2)
A = np.full((2, 4), 0.25, np.float32)
V = np.ones((2, 4, 3), np.float32)
MODEL = dict(vocab_size=48, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
# Few positions: what is longer is refused.
CONFIG = models.Config(**MODEL, head_dim=8, max_positions=64)
TOKENS = np.arange(40)[None]
FILES = tempfile.TemporaryDirectory()
LARGE = steps.Setting(SHAPES["llama-3.1-8b"], None, None, dtype=jnp.bfloat16)


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype))


@functools.cache
def cache(**changes: Any) -> kvjax.KVCache:
    return kvjax.KVCache.init(**(SIZES | changes))


@functools.cache
def layers(policy: Any = None) -> kvjax.LayerCaches:
    return kvjax.empty_cache(policy, layers=2, kv_heads=2, query_heads=4, head_dim=4, budget=8)


@functools.cache
def pages_of_layers() -> kvjax.PagedCache:
    return kvjax.PagedCache.init(batch=1, kv_heads=2, head_dim=4, pages=8, page_size=4, most=8, layers=2)


@functools.partial(jax.jit, static_argnames="layer")
def inserted(cache_: Any, vectors: Any, layer: int | None = None) -> Any:
    return kvjax.insert(cache_, vectors, vectors, layer=layer)


@functools.cache
def model() -> models.Decoder:
    return reference.decoder(CONFIG)


def attend(cache_: Any = None, **changes: Any) -> Any:
    given: dict[str, Any] = dict(query=zeros(1, 2, 4, 4), key=zeros(1, 2, 2, 4), value=zeros(1, 2, 2, 4))
    given |= changes
    held, arrays = cache() if cache_ is None else cache_, [given.pop(name) for name in ("query", "key", "value")]
    return jax.eval_shape(lambda: kvjax.attend(held, *arrays, **given))  # refused before anything is compiled


def attended(function: Any, held: Any, *given: Any, **options: Any) -> Any:
    return jax.eval_shape(functools.partial(function, **options), held, *given)


def linked(link: kvjax.Policy) -> Any:
    """Attend by a link of one's own, behind a score where it is none."""
    policy = link if link.base else kvjax.chain(kvjax.key_norm(), link)
    return attend(kvjax.empty_cache(policy, **FOUR), policy=policy, budget=2)


def observe_each(policies: list[str], budgets: list[float], states: int) -> Any:
    state = (kvjax.h2o().state(1, 2, 2, 8, 4),) * states
    rows = [zeros(1, 2, heads, 4) for heads in (4, 2, 2)]
    return kvjax.observe_each(dataclasses.replace(cache(), state=state), *rows, policies=policies, budgets=budgets)


def run(**changes: Any) -> Any:
    given: dict[str, Any] = dict(tokens=TOKENS, max_new_tokens=4) | changes
    return models.generate(model(), given.pop("tokens"), **given)


def broken(network: Any, name: str) -> Any:
    parameter = getattr(network, name)
    parameter[...] = parameter[...].at[-1].set(np.nan)
    return network


def chat(template: str | None) -> str:
    tokenizer = models.Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), None, template)
    return tokenizer.chat([{"role": "user", "content": "Hello"}])


def written(content: str | bytes, name: str = "a.json") -> Path:
    """Write a file for a function that reads one."""
    path = Path(FILES.name) / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def saved(array: Any = None, **arrays: Any) -> str:
    path = Path(FILES.name) / ("array.npy" if arrays == {} else "arrays.safetensors")
    np.save(path, array) if arrays == {} else save_file(arrays, path)
    return str(path)


def of_shapes(function: Any, **given: Any) -> Any:
    """Return the function of what differs from ``given``; it is refused before anything is compiled."""
    return lambda **changes: jax.eval_shape(lambda: function(**(given | changes)))


POSITIONS = zeros(1, 2, 8, dtype=jnp.int32)
INT8 = zeros(1, 2, 8, 4, dtype=jnp.int8)
KEYS = dict(key=zeros(1, 2, 8, 4), value=zeros(1, 2, 8, 4), key_position=POSITIONS)
attention = of_shapes(
    kernels_pallas.cache_attention, query=zeros(1, 2, 4, 4), query_position=zeros(1, 2, dtype=jnp.int32), **KEYS
)
topk = of_shapes(
    kernels_pallas.caote_topk, weights=zeros(1, 2, 2, 8), value=zeros(1, 2, 8, 4), position=POSITIONS, budget=4
)
mse = of_shapes(
    kernels_pallas.mse_logits, query=zeros(2, 11, 4, 6), key=zeros(2, 11, 2, 6),
    predicted_query=zeros(2, 11, 4, 4), predicted_key=zeros(2, 11, 4, 4),
)  # fmt: skip
pages = of_shapes(
    kernels_pallas.paged_attention, query=zeros(2, 4, 4, 5), key=zeros(15, 4, 5), value=zeros(15, 4, 5),
    position=zeros(15, 4, dtype=int), table=zeros(2, 2, 3, dtype=int), query_position=zeros(2, 4, dtype=int),
)  # fmt: skip
chosen = of_shapes(
    kernels_pallas.select_attention, query=zeros(2, 1, 4, 5), key=zeros(2, 2, 9, 5), value=zeros(2, 2, 9, 5),
    slots=zeros(2, 4, 3, dtype=int),
)  # fmt: skip
select = of_shapes(kvjax.select, importance=zeros(1, 2, 8), position=POSITIONS, budget=4)


@pytest.mark.parametrize(("call", "said"), calls("calls.txt"))
def test_is_refused_in_one_sentence(call, said):
    assert said in str(refused(lambda: eval(call)))


def test_lists_and_single_names_will_do():
    """Call with shapes alone, so that nothing is compiled."""
    rows = np.ones((1, 2, 2, 4)).tolist()

    def given() -> Any:
        held = kvjax.insert(cache(), rows, rows, position=[[0, 1]])
        _, held = kvjax.attend(held, rows, rows, rows)
        chosen = kvjax.select([[[1.0, 2.0]]], [[[0, 1]]], 1), kvjax.keep_mask([1.0, 2.0], [0, 1], 1)
        gram = kvjax.output_projection(jnp.ones((4, 3, 16)), 2, "gram")
        return kvjax.rewind(held, 2), chosen, kvjax.score(A, V, mask=[[True] * 4] * 2), gram

    held, *_, gram = jax.eval_shape(given)
    assert held.next_position.shape == (1,) and (gram.gram.shape, gram.weight) == ((2, 2, 3, 3), None)
