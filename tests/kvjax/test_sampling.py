"""Priority sampling against its definition in float64, and on average against sums over all tokens."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from tests.kvjax.blocks import empty

G, D, TOKENS, BUDGET, BLOCK = 2, 4, 48, 12, 8
SIZES = dict(batch=1, head_dim=D, budget=BUDGET)


@functools.cache
def score():
    """Make a score that does not change: the length of a value."""
    return kvjax.base_score("length", lambda o: jax.numpy.linalg.norm(o.value, axis=-1)[:, :, None])


@functools.cache
def step(policy, budget):
    return jax.jit(lambda cache, *rows: kvjax.attend(cache, *rows, policy=policy, budget=budget))


def tokens(K, alike=False):
    """Draw queries, keys and values [1, T, K G or K, D]; ``alike``: those of all heads are one head's."""
    query, key, value = np.random.default_rng(5).normal(size=(3, 1, TOKENS, K * G, D)).astype(np.float32)
    key, value = key[:, :, :K], value[:, :, :K] * np.geomspace(0.05, 5, TOKENS).astype(np.float32)[:, None, None]
    value = value[:, np.random.default_rng(6).permutation(TOKENS)]
    if alike:
        query, key, value = (np.broadcast_to(x[:, :, :1], x.shape) for x in (query, key, value))
    return query, key, value


def held(policy, K, block, **given):
    """Return the cache when all tokens were fed in blocks."""
    rows, cache = tokens(K, **given), empty(policy, **SIZES, kv_heads=K, query_heads=K * G, block=block)
    for start in range(0, TOKENS, block):
        _, cache = step(policy, BUDGET)(cache, *(x[:, start : start + block] for x in rows))
    return cache


def biases(cache):
    """Return the positions that each head holds, with their biases."""
    heads = zip(np.asarray(cache.position)[0].tolist(), np.asarray(cache.bias)[0].tolist(), strict=True)
    return [{p: b for p, b in zip(*head, strict=True) if p >= 0} for head in heads]


@pytest.mark.parametrize("block", [1, 8, 24])
def test_evictions_one_after_the_other_keep_the_largest_priorities_and_weigh_them_by_their_probability(block):
    K, power = 3, 1.3
    policy = kvjax.chain(score(), kvjax.sample(power=power, seed=7))
    found = biases(held(policy, K, block))
    numbers = kvjax.random(seed=7).update(None, (), observation(K))[0]
    value = tokens(K)[2][0].astype(np.float64)
    for k in range(K):
        weight = power * np.log(np.linalg.norm(value[:, k], axis=-1))
        priority = weight - np.log(np.asarray(numbers, np.float64)[0, k, 0] + 2.0**-25)
        order = np.argsort(-priority)
        threshold = priority[order[BUDGET]]
        assert sorted(found[k]) == sorted(order[:BUDGET])
        for place, bias in found[k].items():
            np.testing.assert_allclose(bias, max(0, threshold - weight[place]), atol=1e-5)


def observation(K):
    nothing = dict.fromkeys(kvjax.Observation._fields) | {"context": kvjax.Context(layer=0)}
    position = np.broadcast_to(np.arange(TOKENS), (1, K, TOKENS))
    return kvjax.Observation(**nothing | {"position": position})


def test_the_sums_that_attention_divides_are_right_on_average():
    """Over 2,000 heads of the same tokens, each with numbers of its own, by sums over all tokens."""
    K = 2000
    policy = kvjax.chain(score(), kvjax.sample(power=1.0), kvjax.protect(sinks=1, recent=2))
    query, key, value = (x[0, :, 0].astype(np.float64) for x in tokens(1))
    mass = np.exp(key @ query[-1] / D**0.5)
    sums = np.concatenate([mass[:, None], mass[:, None] * value], axis=1)  # [T, 1 + D]
    heads = biases(held(policy, K, 8, alike=True))
    estimates = [sum(np.exp(b) * sums[p] for p, b in head.items()) for head in heads]
    off = (np.mean(estimates, axis=0) - sums.sum(axis=0)) / (np.std(estimates, axis=0) / K**0.5)
    assert (abs(off) < 4).all(), off
    assert {0, TOKENS - 2, TOKENS - 1} <= set.intersection(*map(set, heads))


def test_a_score_of_attention_sees_what_the_token_itself_gets():
    """The weights of the last query, by which the next eviction draws: without the biases of the last one."""

    def init(B, K, G, S, D):
        return jax.numpy.zeros((B, K, S, G))

    def update(_, state, o):
        return o.columns.last, jax.numpy.swapaxes(o.columns.last, 2, 3)

    needs = kvjax.Needs(frozenset({"last"}))
    policy = kvjax.chain(kvjax.Policy("last", init, update, needs, base=True, nonnegative=True), kvjax.sample())
    rows, cache = tokens(1), empty(policy, **SIZES, kv_heads=1, query_heads=G, block=BLOCK)
    for start in range(0, 4 * BLOCK, BLOCK):
        before = cache
        _, cache = step(policy, BUDGET)(cache, *(x[:, start : start + BLOCK] for x in rows))
    bias = biases(before)[0] | dict.fromkeys(range(start, start + BLOCK), 0.0)
    assert max(bias.values()) > 0
    query, key = (x[0].astype(np.float64) for x in rows[:2])
    position, last = np.asarray(cache.position)[0, 0], np.asarray(jax.tree.leaves(cache.state)[0])[0, 0]
    for g in range(G):
        mass = {p: np.exp(key[p, 0] @ query[start + BLOCK - 1, g] / D**0.5) for p in bias}
        total = sum(mass[p] * np.exp(bias[p]) for p in bias)
        own = [mass[p] / total for p in position[position >= 0]]
        np.testing.assert_allclose(last[position >= 0, g], own, rtol=1e-4)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("keydiff+sample", "put 'normalise' between"),
        ("h2o+sample+caote", "'caote' changes scores behind 'sample', by which tokens are drawn; put it before"),
        ("tova+sample", "take heads='group'"),
        ("laprox+sample", "linear in attention"),
        ("snapkv+sample@cake", "'cake' measures more of attention than is linear in it"),
        ("h2o+sample+merge", "merges values twice"),
        ("kvgrad(measure='change')+sample", "linear in attention"),
        ("h2o+sample@duo", "heads of 'duo' keep tokens by their places"),
        ("h2o+sample@simlayer", "heads of 'simlayer' keep tokens by their places"),
        ("h2o+sample(power=0)", "give a number in"),
    ],
)
def test_a_chain_that_cannot_be_drawn_by_is_refused_in_one_sentence(name, said):
    with pytest.raises(ValueError, match=said.replace("'", ".")):
        kvjax.parse(name)
