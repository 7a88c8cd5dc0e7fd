"""Files of what was measured of a model: what they may hold, and what reads them."""

import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvjax
from kvjax._src.calibration import read_array
from tests.kvjax import blocks
from tests.kvjax.blocks import D, K, each_head, empty, in_context, scores

L = 3


@pytest.fixture
def filters(tmp_path):
    array = np.random.default_rng(0).normal(size=(L, K, D)).astype(np.float32)
    file = str(tmp_path / "filters@1.npy")  # a name may have what short names are made of
    np.save(file, array)
    return array, file


@pytest.mark.parametrize("layer", [0, 2])
def test_q_filters_are_minus_the_products_of_keys_and_filters(filters, layer):
    array, file = filters
    block = blocks.make(40)

    def formula(b, k, live):
        return -np.asarray(block.observation.key[b, k], np.float64)[live] @ array[layer, k].astype(np.float64)

    found = scores(kvjax.q_filters(file=file), in_context(block.observation, layer=np.int32(layer)))
    np.testing.assert_allclose(found, each_head(block, formula), rtol=2e-5, atol=1e-6)


def test_a_head_alone_has_its_own_filter(filters):
    _, file = filters
    seen = blocks.make(41).observation
    alone = {name: np.asarray(getattr(seen, name))[:, 1:] for name in ("key", "position", "value")}
    policy = kvjax.q_filters(file=file)
    found, _ = blocks.compiled(policy)((), seen._replace(**alone, head=np.array([1])))
    np.testing.assert_array_equal(found, np.asarray(blocks.compiled(policy)((), seen)[0])[:, 1:])


def test_a_short_name_names_the_file(filters):
    policy = kvjax.parse(f"q_filters(file={filters[1]!r})+normalise+caote")
    alone = rf"q_filters\(file={filters[1]!r},content='[0-9a-f]{{8}}'\)\+normalise\+caote"
    assert re.fullmatch(alone, policy.name)
    competing = policy @ "layer"
    assert re.fullmatch(f"{alone}@layer", competing.name) and kvjax.parse(competing.name) is competing
    assert (competing @ "model").name == f"{policy.name}@model"


def test_filters_of_half_precision_are_read(filters, tmp_path):
    array = filters[0].astype(ml_dtypes.bfloat16)
    save_file({"q_filters": array}, tmp_path / "narrow.safetensors")
    found = read_array("q_filters", str(tmp_path / "narrow.safetensors"), "L K D")
    np.testing.assert_array_equal(found, array.astype(np.float32))


def test_a_name_has_a_digest_of_what_its_file_held(tmp_path):
    """So answers, records and caches that are found by name are of the same numbers."""
    path = tmp_path / "heads.npy"
    np.save(path, np.ones((L, K)))
    one = kvjax.parse(f"snapkv@headkv(file='{path}')")
    assert re.fullmatch(r"snapkv@headkv\(file='.*',content='[0-9a-f]{8}'\)", one.name)
    assert kvjax.parse(one.name) is kvjax.parse(f"snapkv@headkv(file='{path}')") is one
    saved, sizes = (
        tmp_path / "saved.safetensors",
        dict(layers=L, kv_heads=K, query_heads=K, head_dim=D, budget=32, block=32),
    )
    kvjax.save_cache(saved, empty(one, **sizes), policy=one)
    np.save(path, np.full((L, K), 2.0))
    other = kvjax.parse(f"snapkv@headkv(file='{path}')")
    assert other is not one and other.name != one.name
    with pytest.raises(ValueError, match=r"heads.npy' holds other numbers .* leave that out"):
        kvjax.parse(one.name)
    for given in (dict(policy=other), {}):
        with pytest.raises(ValueError, match=r"was saved with the policy|names the policy .* cannot be read"):
            kvjax.load_cache(saved, **given)
