"""The link `caote`: what it measures, through W_O and in rounds, over a block's scores. Its formula: test_scores.py."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.transforms import shares
from tests.kvjax import blocks, definitions
from tests.kvjax.blocks import B, D, G, K, N, each_head, heads_of, scores
from tests.tiers import first

E = 7
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


def projected(seed: int, policy: kvjax.Policy | str, **options) -> tuple[blocks.Block, np.ndarray]:
    """A block whose layer offers what the policy asks of W_O, and W_O itself, [N, D, E]."""
    policy = kvjax.parse(policy) if isinstance(policy, str) else policy
    weight = np.random.default_rng(seed).normal(size=(N, D, E)).astype(np.float32)
    block = blocks.make(seed, **options)
    projection = blocks.project(weight, policy.needs.projections)
    return block._replace(observation=blocks.in_context(block.observation, projection=projection)), weight


@pytest.mark.parametrize(("cross", "fast"), first(2, [(True, False), (False, True), (False, False), (True, True)]))
def test_through_the_output_it_is_the_error_of_the_layers_output(cross, fast):
    policy = kvjax.chain(kvjax.h2o(), kvjax.caote(target="output", cross=cross, fast=fast))
    block, W = projected(0, policy)

    def formula(b, k, live):
        received = block.weights[b, heads_of(k)].sum(1)[:, live]
        value = np.asarray(block.observation.value[b, k], np.float64)[live]
        return definitions.layer_errors(received / received.sum(-1, keepdims=True), value, W[heads_of(k)], cross, fast)

    close(scores(policy, block), each_head(block, formula))


@pytest.mark.parametrize(("cross", "kind"), [(True, "factor"), (False, "gram")])
def test_through_the_output_it_asks_for_what_it_reads(cross, kind):
    assert kvjax.caote(target="output", cross=cross).needs.projections == {kind}
    assert kvjax.chain(kvjax.h2o(), kvjax.fast_caote(target="output", cross=cross)).needs.projections == {kind}
    assert kvjax.caote().needs.projections == frozenset()


@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("rounds", [1, 3])
def test_without_the_projection_it_says_what_to_hand_over(cross, rounds):
    policy = kvjax.chain(kvjax.h2o(), kvjax.caote(target="output", cross=cross, rounds=rounds))
    kind = "factor" if cross else "gram"
    message = rf"target='output'.*reads the {kind} of the layer's output projection.*attend \(Context\(projection="
    with pytest.raises(ValueError, match=message):
        scores(policy, blocks.in_context(blocks.make(1).observation, projection=None))
    other, _ = projected(1, kvjax.caote(target="output", cross=not cross))
    with pytest.raises(ValueError, match=message):
        scores(policy, other)


@pytest.mark.parametrize("name", first(1, ["caote", "caote(norm=1)", "caote(group='mean')", "fast_caote"]))
def test_one_round_is_score_bit_for_bit(name):
    block = blocks.make(2)
    o = block.observation
    options = {"caote(norm=1)": {"norm": 1}, "caote(group='mean')": {"group": "mean"}, "fast_caote": {"fast": True}}

    @jax.jit
    def plain(o):
        return kvjax.score(
            shares(o.columns.sum, o), o.value, mask=o.live, **{"group": "exact", **options.get(name, {})}
        )

    live = np.asarray(o.position) >= 0
    rounds = name + "(rounds=1)" if "(" not in name else name.replace(")", ",rounds=1)")
    for written in (name, rounds):
        found = scores(f"h2o(accumulate=False)+{written}", block)
        np.testing.assert_array_equal(found[live], np.asarray(plain(o))[live])


@pytest.mark.parametrize(
    ("target", "rounds", "seed"),
    first(2, [("value", 3, 3), ("output", 2, 4), ("value", 8, 5), ("output", 3, 5), ("output", 8, 3), ("value", 2, 4)]),
)
def test_rounds_evict_what_is_cheapest_after_the_rounds_before(target, rounds, seed):
    budget, protection = 4, kvjax.protect(sinks=2, recent=1)
    policy = kvjax.chain(kvjax.h2o(), kvjax.caote(target=target, rounds=rounds), protection)
    block, W = projected(seed, policy, budget=budget)
    o = block.observation._replace(budget=jnp.asarray(np.int32([budget, budget + 1])))
    result = scores(policy, o)
    for b, k in np.ndindex(B, K):
        position = np.asarray(o.position[b, k])
        protected = (position >= 0) & ((position < 2) | (position >= int(o.next_position[b]) - 1))
        received = block.weights[b, heads_of(k)].sum(1)
        value = np.asarray(o.value[b, k], np.float64)
        left, order = np.flatnonzero(position >= 0), []
        leaving = max(len(left) - budget - b, 0)
        for i in range(rounds):
            shares = received[:, left] / received[:, left].sum(-1, keepdims=True)
            errors = definitions.layer_errors(shares, value[left], W[heads_of(k)] if target == "output" else None, True)
            last = dict(zip(left.tolist(), errors.tolist(), strict=True))
            n = leaving * (i + 1) // rounds - leaving * i // rounds
            ranked = [slot for slot in left[np.argsort(errors)] if not protected[slot]]
            order += ranked[:n]
            left = np.setdiff1d(left, ranked[:n])
        assert (np.diff(result[b, k, order]) > 0).all() and (result[b, k, order] < 0).all()
        assert (result[b, k, protected] == np.inf).all()
        stay = [slot for slot in left if not protected[slot]]
        close(result[b, k, stay], [last[slot] for slot in stay])
        kept = definitions.kept(result[b, k], position, budget + b)
        assert sorted(np.flatnonzero(kept)) == sorted(left)


@pytest.mark.parametrize("target", first(1, ["output", "value"]))
def test_attend_evicts_in_rounds_and_holds_the_budget(target):
    policy = kvjax.chain(kvjax.h2o(), kvjax.caote(target=target, rounds=4), kvjax.protect(sinks=1))
    rng = np.random.default_rng(9)
    weight = rng.normal(size=(N, D, E)).astype(np.float32)
    projection = blocks.project(weight, policy.needs.projections) if target == "output" else None
    state = policy.init(B, K, G, 12, D)
    cache = kvjax.KVCache.init(batch=B, kv_heads=K, slots=12, head_dim=D, state=state)
    step = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=6))
    for _ in range(3):
        q, k, v = (rng.normal(size=(B, 6, heads, D)).astype(np.float32) for heads in (N, K, K))
        out, cache = step(cache, q, k, v, context=kvjax.Context(projection=projection))
        position = np.asarray(cache.position)
        assert (
            np.isfinite(np.asarray(out)).all()
            and ((position >= 0).sum(-1) == 6).all()
            and (position == 0).any(-1).all()
        )


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("h2o+caote(target='output',rounds=1)", "h2o+caote(target='output')"),
        ("h2o+caote(target='value',cross=True)", "h2o+caote"),
        ("h2o+caote(rounds=8,norm=2)", "h2o+caote(rounds=8)"),
        ("h2o+caote(fast=True,target='output',cross=False)", "h2o+fast_caote(target='output',cross=False)"),
        ("h2o+fast_caote(rounds=2)", "h2o+fast_caote(rounds=2)"),
        ("h2o+caote(group='mean',rounds=2)", "h2o+caote(group='mean',rounds=2)"),
    ],
)
def test_its_name_says_what_differs_from_the_defaults(name, written):
    policy = kvjax.parse(name)
    assert str(policy) == written
    assert str(kvjax.parse(written)) == written


def test_scores_of_rounds_only_order_the_tokens_of_one_head():
    one, several = kvjax.caote(), kvjax.caote(rounds=2)
    assert (one.comparable, one.nonnegative) == (True, True)
    assert (several.comparable, several.nonnegative) == (False, False)
    with pytest.raises(ValueError, match=r"'layer' needs scores that heads can compare.*rounds=1"):
        kvjax.parse("h2o+caote(rounds=2)@layer")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "values"}, r"caote: target is 'values'; expected 'value' or 'output'"),
        ({"target": "output", "norm": 1}, r"caote: norm is 1 .*take norm=2 and group='exact'"),
        ({"target": "output", "group": "mean"}, r"caote: .*group 'mean', but target='output'.*group='exact'"),
        ({"cross": False}, r"caote: cross=False leaves out cross terms in W_O; take it with target='output'"),
        ({"rounds": 0}, r"caote: rounds is 0; give an int from 1"),
        ({"rounds": 2.0}, r"caote: rounds is 2.0; expected an integer"),
        ({"rounds": True}, r"caote: rounds is True; expected an integer"),
        ({"rounds": 2, "norm": "inf"}, r"caote: norm is 'inf', but rounds follow .*take norm=2 or rounds=1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [kvjax.caote, kvjax.fast_caote])
def test_a_wrong_argument_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
