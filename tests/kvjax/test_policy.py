"""Chains and their short names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice

import kvjax
from kvjax._src.policy_checks import check_state
from tests.kernels_pallas.targets import on_device
from tests.kvjax import blocks

CHAINS = """
h2o h2o(accumulate=False) snapkv(window=2,kernel=3)+fast_caote tova(heads='group')+caote(norm=1,group='mean')
key_norm+normalise+caote random(seed=7)+pool(kernel=3) h2o+caote+protect(sinks=1)
""".split()


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_writes_itself_as_its_short_name(name):
    links = [eval(f"kvjax.{link}" if link.endswith(")") else f"kvjax.{link}()") for link in name.split("+")]
    assert str(kvjax.chain(*links)) == name == str(kvjax.parse(name))
    whole = kvjax.chain(*links) if links[1:] else links[0]
    assert whole is kvjax.parse(name)  # so that jit finds its program again


@pytest.mark.parametrize(
    ("written", "short"),
    [
        ("  h2o + caote ", "h2o+caote"),
        ("h2o()+caote()", "h2o+caote"),
        ("(h2o+caote)@layer", "h2o+caote@layer"),
        ("snapkv( window = 16 )\t+ caote", "snapkv(window=16)+caote"),
        ("snapkv(window=32,kernel=5)", "snapkv"),
        ("snapkv_tuned+caote", "snapkv(kernel=13)+caote"),
        ("h2o+protect(recent=1.0)", "h2o+protect(recent=1.0)"),
    ],
)
def test_spaces_and_defaults_do_not_make_another_policy(written, short):
    assert str(kvjax.parse(written)) == short


def test_a_count_is_no_share_though_the_numbers_are_equal():
    one, all_of_them = kvjax.protect(recent=1), kvjax.protect(recent=1.0)
    assert (one.protected(10), all_of_them.protected(10)) == ((0, 1), (0, 10))


def test_a_budget_of_the_protected_tokens_alone_is_enough():
    policy = "h2o+protect(sinks=4,recent=4)"
    kvjax.check_budget(policy, 8)
    with pytest.raises(
        ValueError, match=r"the budget is 7 tokens, but .* keeps 4 first and 4 last ones: give at least 8"
    ):
        kvjax.check_budget(policy, 7)


def test_a_chain_joins_what_its_links_declare():
    policy = kvjax.parse("snapkv(window=2)+pool+caote+protect(sinks=4)")
    assert (
        policy.needs.statistics == {"window_mean"} and policy.needs.window == 2 and policy.base and policy.nonnegative
    )
    assert policy.protection == kvjax.Protection(sinks=4, recent=2)
    assert policy.heads == "group" and kvjax.parse("tova+caote").heads == "layer"


def test_a_chain_of_one_own_score_runs():
    newest = kvjax.base_score("newest", lambda o: o.position[:, :, None].astype(jnp.float32))
    block = blocks.make(1)
    result = blocks.scores(kvjax.chain(newest), block)
    position = np.asarray(block.observation.position)
    np.testing.assert_array_equal(result, np.where(position >= 0, position, np.nan))


def test_a_score_of_ones_own_is_tried_where_programs_are_made_for_a_tpu():
    tried = []
    own = kvjax.base_score("own", lambda o: tried.append(o.columns.sum.shape) or o.columns.sum, statistics=("sum",))
    with on_device(AbstractDevice("TPU v5e", 1, "tpu")):
        tried.clear()
        check_state(own, 8, 2, 2)
    assert tried


SHARES = [x / 100 for x in range(101)]
counted = jax.jit(lambda b: jnp.stack([kvjax.Protection(recent=share).counts(b)[1] for share in SHARES]))


@pytest.mark.parametrize("budget", [1, 7, 50, 100, 256, 512, 2048, 131_072])
def test_a_share_counts_the_same_inside_jit(budget):
    outside = [kvjax.Protection(recent=share).counts(budget)[1] for share in SHARES]
    exact = [percent * budget // 100 for percent in range(101)]
    assert outside == counted(np.int32(budget)).tolist() == exact
