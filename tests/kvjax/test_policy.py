"""Chains and their short names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.kvjax import blocks

CHAINS = {
    "h2o": lambda: kvjax.chain(kvjax.h2o()),
    "h2o(accumulate=False)": lambda: kvjax.chain(kvjax.h2o(accumulate=False)),
    "snapkv(window=2,kernel=3)+fast_caote": lambda: kvjax.chain(kvjax.snapkv(window=2, kernel=3), kvjax.fast_caote()),
    "tova(heads='group')+caote(norm=1,group='mean')": lambda: kvjax.chain(
        kvjax.tova(heads="group"), kvjax.caote(norm=1, group="mean")
    ),
    "key_norm+normalise+caote": lambda: kvjax.chain(kvjax.key_norm(), kvjax.normalise(), kvjax.caote()),
    "random(seed=7)+pool(kernel=3)": lambda: kvjax.chain(kvjax.random(seed=7), kvjax.pool(kernel=3)),
    "h2o+caote+protect(sinks=1,recent=0.5)": lambda: kvjax.chain(
        kvjax.h2o(), kvjax.caote(), kvjax.protect(sinks=1, recent=0.5)
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_writes_itself_as_its_short_name(name):
    assert str(CHAINS[name]()) == name == str(kvjax.parse(name))
    assert "+" not in name or CHAINS[name]() is kvjax.parse(name)  # so that jit finds its program again


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


def test_a_chain_joins_what_its_links_declare():
    policy = kvjax.parse("snapkv(window=2)+pool+caote+protect(sinks=4)")
    assert (
        policy.needs.statistics == {"window_mean"} and policy.needs.window == 2 and policy.base and policy.nonnegative
    )
    assert [tuple(p) for p in policy.protections] == [(0, 2), (4, 0)]
    assert policy.heads == "group" and kvjax.parse("tova+caote").heads == "layer"


def test_a_chain_of_one_own_score_runs():
    newest = kvjax.base_score("newest", lambda o: o.position[:, :, None].astype(jnp.float32))
    block = blocks.make(1)
    result = blocks.scores(kvjax.chain(newest), block)
    position = np.asarray(block.observation.position)
    np.testing.assert_array_equal(result, np.where(position >= 0, position, np.nan))


def test_two_windows_that_differ_are_refused():
    other = kvjax.Policy(
        "other", kvjax.h2o().init, kvjax.h2o().update, kvjax.Needs(frozenset({"window_mean"}), window=3)
    )
    with pytest.raises(
        ValueError, match=r"'snapkv\+other': observation windows of \[3, 32\] queries meet in one policy; expected one"
    ):
        kvjax.chain(kvjax.snapkv(), other)


@pytest.mark.parametrize(
    ("name", "budget", "message"),
    [
        (
            "snapkv(window=8)",
            7,
            r"budget is 7 tokens, but 'snapkv\(window=8\)' always keeps 0 first and 8 last.*at least 8",
        ),
        ("h2o+protect(sinks=4,recent=0.5)", 6, r"budget is 6 tokens.*keeps 4 first and 3 last ones: give at least 7"),
        ("h2o+protect(sinks=4,recent=0.75)", 8, r"always keeps 4 first and 6 last ones: give at least 10"),
        ("streaming(sinks=4)", 3, r"always keeps 4 first and 0 last"),
        ("h2o", 0, r"the budget is 0; at least 1 token must stay"),
    ],
)
def test_a_budget_smaller_than_what_is_protected_is_refused(name, budget, message):
    with pytest.raises(ValueError, match=message):
        kvjax.check_budget(kvjax.parse(name), budget)


SHARES = [x / 100 for x in range(101)]
counted = jax.jit(lambda b: jnp.stack([kvjax.Protection(recent=share).counts(b)[1] for share in SHARES]))


@pytest.mark.parametrize("budget", [1, 7, 50, 100, 256, 512, 2048, 131_072])
def test_a_share_counts_the_same_inside_jit(budget):
    outside = [kvjax.Protection(recent=share).counts(budget)[1] for share in SHARES]
    exact = [percent * budget // 100 for percent in range(101)]
    assert outside == counted(np.int32(budget)).tolist() == exact


def per_row(B, K, G, S, D):
    return np.zeros((B, S), np.float32)


def growing(B, K, G, S, D):
    return np.zeros((B, K, S), np.float32)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("link", "message"),
    [
        (
            kvjax.base_score("mine", lambda o: o.columns.sum),
            "'mine' reads the statistic 'sum', which nothing asked for",
        ),
        (
            kvjax.Policy("late", kvjax.no_state, lambda scores, state, o: (scores * o.columns.last, state)),
            r"'late' reads the statistic 'last'.* declare it: statistics=\('last',\) of kvjax.base_score, or needs=",
        ),
        (
            kvjax.base_score("flat", lambda o: o.key[..., 0]),
            r"'flat' returned scores of shape \(1, 2, 4\); expected \[B, K, G, S\], \(1, 2, 2, 4\), or \[B, K, 1, S\]",
        ),
        (kvjax.Policy("few", per_row, lambda *given: given[:2]), r"the state of 'few' has an array of shape \(3, 4\)"),
        (
            kvjax.Policy("grows", growing, lambda scores, state, o: (scores, state[..., None])),
            r"'grows' returned a state of other arrays than it was given: \[\(1, 2, 4\)\] became \[\(1, 2, 4, 1\)\]",
        ),
        (
            kvjax.base_score(
                "logs", lambda o: -(o.columns.weights * jnp.log(o.columns.weights)).sum(3), statistics=("weights",)
            ),
            "'logs' scored 6 of 8 tokens NaN when it was tried .*; look for 0 / 0 and for 0 \\* log 0",
        ),
    ],
    ids=lambda given: given.name if isinstance(given, kvjax.Policy) else "",
)
def test_a_link_that_is_wrong_is_named(link, message):
    policy = link if link.base else kvjax.chain(kvjax.key_norm(), link)
    query, row = np.ones((1, 2, 4, 2), np.float32), np.ones((1, 2, 2, 2), np.float32)
    sizes = dict(kv_heads=2, query_heads=4, head_dim=2, budget=2, block=2)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda: kvjax.attend(kvjax.empty_cache(policy, **sizes), query, row, row, policy=policy, budget=2)
        )
