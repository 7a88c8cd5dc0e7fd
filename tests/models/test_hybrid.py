"""Models some of whose layers have no KV cache: their states in blocks, rows, files and runs under a budget."""

import dataclasses
import functools
import itertools
import json
import re

import jax
import numpy as np
import pytest

import kvjax
import models
from models import driver, recurrent
from models.config import Config, Recurrence
from models.config_json import from_hugging_face
from models.decoder import MIXES
from tests.models.make_golden import BLOCK, GOLDEN, RECENT
from tests.tiers import first, nightly

NET = Recurrence((0,), key_heads=2, value_heads=4, key_dim=6, value_dim=5, kernel=3)
SPACE = dataclasses.replace(NET, kind="state_space")
TOKENS = np.load(GOLDEN / "qwen3_next" / "golden.npz")["tokens_0"]
# A model of each kind of layers without a KV cache.
KINDS = QWEN, GRANITE = "qwen3_next", "granite4_h"
LENGTHS = np.array([48, 29])
ROWS = np.concatenate([TOKENS, TOKENS[:, ::-1]])


@functools.cache
def model(name="qwen3_next", **options):
    return models.load(GOLDEN / name, **options)[0]


def weights_of(net, width, rng):
    J, JW, Z = net.value_heads, net.value_heads * net.value_dim, net.channels
    shapes = dict(recurrent_kernel=(Z, 1, net.kernel), recurrent_log_decay=(J,), recurrent_decay_bias=(J,))
    if net.kind == "delta_net":
        shapes |= dict(delta_in=(Z + JW + 2 * J, width), delta_norm=(net.value_dim,))
    else:
        shapes |= dict(space_in=(Z + JW + J, width), space_kernel_bias=(Z,), space_skip=(J,), space_norm=(JW,))
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def silu(x):
    return x / (1 + np.exp(-x))


def normed(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def by_definition(net, weights, x):
    """A gated delta net or a state-space layer for one text, token by token in float64, and the state at the end."""
    J, W, H, P, M, Z = net.value_heads, net.value_dim, net.key_heads, net.key_dim, net.kernel, net.channels
    inputs, memory, out, delta = np.zeros((M - 1, Z)), np.zeros((J, P, W)), [], net.kind == "delta_net"
    for token in x:
        if delta:
            mixed, gate, rate, decay = np.split(weights["delta_in"] @ token, np.cumsum([Z, J * W, J]))
        else:
            gate, mixed, decay = np.split(weights["space_in"] @ token, np.cumsum([J * W, Z]))
        window = np.concatenate([inputs, mixed[None]])
        inputs = window[1:]
        mixed = np.einsum("mz,zm->z", window, weights["recurrent_kernel"][:, 0])
        step = np.log1p(np.exp(decay + weights["recurrent_decay_bias"]))
        decay = np.exp(-np.exp(weights["recurrent_log_decay"]) * step)
        if delta:
            query, key, value = np.split(silu(mixed), [H * P, 2 * H * P])
            query, key = (own.reshape(H, P) for own in (query, key))
            query, key = (own / np.sqrt((own**2).sum(-1, keepdims=True) + 1e-6) for own in (query, key))
            query, step = query / P**0.5, 1 / (1 + np.exp(-rate))
        else:
            value, key, query = np.split(silu(mixed + weights["space_kernel_bias"]), [J * W, J * W + H * P])
            query, key = (own.reshape(H, P) for own in (query, key))
        value, read = value.reshape(J, W), np.zeros((J, W))
        for head in range(J):
            own = head * H // J
            memory[head] *= decay[head]
            said = memory[head].T @ key[own] if delta else 0
            memory[head] += step[head] * np.outer(key[own], value[head] - said)
            read[head] = memory[head].T @ query[own]
        if delta:
            made = normed(read) * weights["delta_norm"] * silu(gate.reshape(J, W))
        else:
            made = (read + weights["space_skip"][:, None] * value) * silu(gate.reshape(J, W))
            made = normed(made.reshape(H, -1)).reshape(-1) * weights["space_norm"]
        out.append(made.reshape(-1))
    return np.array(out), inputs, memory


@pytest.mark.parametrize("net", [NET, SPACE], ids=lambda net: net.kind)
def test_blocks_of_ragged_rows_give_what_the_definition_gives_token_by_token(net, monkeypatch):
    monkeypatch.setattr(recurrent, "CHUNK", 4)
    rng = np.random.default_rng(0)
    weights, x = weights_of(net, 7, rng), rng.normal(size=(3, 19, 7))
    # Each row's tokens in two blocks: in front, at the end, and with gaps, as when rows of a batch differ.
    valid = np.zeros((3, 2, 10), bool)
    valid[0], valid[1, :, 7:], valid[2, 1] = True, True, np.arange(10) % 3 > 0
    mix = jax.jit(functools.partial(MIXES[net.kind], net))
    state = {own.name: np.zeros((3, *own.shape), own.dtype) for own in recurrent.state_arrays(net, "float32")}
    made, fed = [[], [], []], [0, 0, 0]
    for block in range(2):
        given = rng.normal(size=(3, 10, 7))  # what stands at other places says nothing
        for row in range(3):
            count = min(int(valid[row, block].sum()), 19 - fed[row])
            valid[row, block, np.flatnonzero(valid[row, block])[count:]] = False
            given[row, valid[row, block]] = x[row, fed[row] : fed[row] + count]
            fed[row] += count
        out, state = mix(weights, given.astype(np.float32), valid[:, block], state)
        for row in range(3):
            made[row] += list(np.asarray(out)[row, valid[row, block]])
    state = jax.device_get(state)
    assert fed == [19, 6, 6]
    for row, count in enumerate(fed):
        expected, inputs, memory = by_definition(net, weights, x[row, :count])
        np.testing.assert_allclose(made[row], expected, atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(state["inputs"][row], inputs, atol=1e-5)
        np.testing.assert_allclose(state["memory"][row], memory, atol=1e-5, rtol=1e-5)


def states(cache, row=None):
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(cache.recurrent)]
    return leaves if row is None else [leaf[row : row + 1] for leaf in leaves]


def assert_same(found, expected, atol=1e-4):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


@pytest.mark.parametrize(("policy", "name"), first(1, itertools.product([None, "recency", "h2o@adakv"], KINDS)))
def test_a_run_that_goes_on_from_a_file_is_as_if_uninterrupted(policy, name, tmp_path):
    own, golden = model(name), np.load(GOLDEN / name / "golden.npz")
    tokens, settings = golden["tokens_0"], dict(policy=policy, budget=None if policy is None else RECENT, block=BLOCK)
    whole = models.prefill(own, tokens, **settings)
    if policy is None:
        assert_same([whole.logits], [golden["logits_0"][:, -1]])
    half = models.prefill(own, tokens[:, :24], **settings).cache
    kvjax.save_cache(tmp_path / "half.safetensors", half, policy=policy)
    assert kvjax.cache_info(tmp_path / "half.safetensors")["cache_bytes"] == half.nbytes
    loaded = kvjax.load_cache(tmp_path / "half.safetensors")
    assert jax.tree.structure(loaded) == jax.tree.structure(half)
    found = models.prefill(own, tokens[:, 24:], cache=loaded, **settings)
    assert_same([found.logits, *states(found.cache)], [whole.logits, *states(whole.cache)])


@pytest.mark.matrix
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("policy", ["h2o", "h2o@adakv"])
def test_a_row_that_joins_another_batch_midway_goes_on_as_if_uninterrupted(policy, name):
    own, settings = model(name), dict(policy=policy, budget=16, block=8)
    whole, half = (models.prefill(own, TOKENS[:, :length], **settings) for length in (48, 24))
    pair = jax.jit(kvjax.join)(jax.jit(kvjax.leave)(kvjax.repeat(half.cache, 2), 0), 1, half.cache)
    both = np.concatenate([TOKENS[:, :24], TOKENS[:, 24:]])  # the row that left begins anew
    found = models.prefill(own, both, cache=pair, **settings)
    assert_same([found.logits], [np.concatenate([half.logits, whole.logits])])
    assert_same(states(found.cache, 0) + states(found.cache, 1), states(half.cache) + states(whole.cache))


def with_states(*numbers):
    """A cache of one layer with one of as many rows beside it that has a state of two numbers."""
    rows = len(numbers)
    zeros, none = np.zeros((rows, 1, 3, 2), np.float32), np.full((rows, 1, 3), -1)
    layer = kvjax.KVCache.of(zeros, zeros, none, np.zeros(rows, int))
    return kvjax.LayerCaches((layer,), ({"memory": np.array([[n, n] for n in numbers], np.float32)},))


def test_states_join_leave_and_are_repeated_with_their_rows():
    @jax.jit
    def run(batch, one):
        joined = kvjax.join(batch, 1, one)
        return joined.recurrent, kvjax.leave(joined, 0).recurrent, kvjax.repeat(one, 2).recurrent

    found = [np.asarray(own["memory"])[:, 0].tolist() for (own,) in run(with_states(1, 2, 3), with_states(7))]
    assert found == [[1, 7, 3], [0, 7, 3], [7, 7]]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("settings", "name"),
    first(3, [
        (dict(policy=None), "qwen3_next"), (dict(policy="h2o@adakv"), "qwen3_next"), (dict(policy="h2o"), "granite4_h"),
        (dict(policy="h2o@adakv"), "granite4_h"),
        *((settings, "qwen3_next") for settings in (
            dict(policy="h2o"), dict(policy="kvzip"), dict(policy="laprox(window=4)", when="prompt"),
            dict(policy="snapkv(window=4)+caote", when="prompt"),
        )),
    ], rest=nightly),
)  # fmt: skip
def test_rows_of_different_length_answer_as_each_alone_and_in_one_program(settings, name, monkeypatch):
    settings |= dict(budget=None if settings["policy"] is None else 12, block=8, max_new_tokens=6, end=())
    own = model(name)
    together = models.generate(own, ROWS, lengths=LENGTHS, **settings)
    for row, length in enumerate(LENGTHS):
        alone = models.generate(own, ROWS[row : row + 1, :length], **settings)
        assert together.tokens[row].tolist() == alone.tokens[0].tolist()
        assert_same(states(together.cache, row), states(alone.cache))
    monkeypatch.setattr(driver, "by_layer", lambda *given: False)
    at_once = models.generate(own, ROWS, lengths=LENGTHS, **settings)
    assert at_once.tokens.tolist() == together.tokens.tolist()
    assert_same(states(at_once.cache), states(together.cache))


@pytest.mark.matrix
@pytest.mark.parametrize(("policy", "name"), [(p, KINDS[0]) for p in ("h2o", "kvzip@adakv")] + [("h2o", KINDS[1])])
def test_requests_that_come_and_go_answer_as_each_alone(policy, name):
    settings = dict(policy=policy, budget=12, block=8, max_new_tokens=4, end=())
    prompts = [TOKENS[0, :length].tolist() for length in (20, 33, 9, 41)]
    engine = models.Engine(model(name), rows=2, **settings)
    handles, made = [engine.submit(prompt) for prompt in prompts], {}
    for token in engine.run():
        made.setdefault(token.handle, []).append(token.token)
    alone = [models.generate(model(name), [prompt], **settings).tokens[0].tolist() for prompt in prompts]
    assert [made[handle] for handle in handles] == alone


@pytest.mark.matrix
def test_what_is_repeated_leaves_no_trace_in_the_states():
    slow = {name: np.full_like(own, -9) for name, own in model().arrays().items() if name.endswith("log_decay")}
    remembers = models.Decoder(model().config, model().arrays() | slow)  # else the last tokens alone make the state
    repeated = models.prefill(remembers, TOKENS, policy="repeat", when="prompt", block=BLOCK, budget=24).cache
    assert repeated.num_live.sum() <= 48  # 24 of 48 tokens in each of two heads
    assert_same(states(repeated), states(models.prefill(remembers, TOKENS, block=BLOCK).cache))


@pytest.mark.matrix
def test_policies_that_share_a_prompt_have_the_states_of_each_alone():
    asked = ["full", ("h2o", 12), ("snapkv(window=8)", 16), ("h2o@adakv", 12)]
    for (policy, budget), found in zip(
        [("full", None), *asked[1:]], models.prefill_each(model(), TOKENS, policies=asked, block=8), strict=True
    ):
        when = {} if budget is None else dict(when="prompt")
        alone = models.prefill(model(), TOKENS, policy=policy, budget=budget, block=8, **when)
        assert_same([found.logits, *states(found.cache)], [alone.logits, *states(alone.cache)])


@pytest.mark.matrix
@pytest.mark.parametrize("name", KINDS)
def test_a_mesh_gives_what_one_device_gives_or_refuses(name):
    on_mesh = model(name, mesh=models.parse_mesh("data=2,tensor=2"))
    settings = dict(lengths=LENGTHS, budget=12, block=8)
    found, expected = (models.prefill(own, ROWS, policy="h2o", **settings) for own in (on_mesh, model(name)))
    assert_same([found.logits, *states(found.cache)], [expected.logits, *states(expected.cache)])
    with pytest.raises(ValueError, match="keeps its pages on one device"):
        models.prefill(on_mesh, ROWS, policy="h2o@adakv", **settings)


def test_memory_counts_the_states_and_only_layers_with_attention_have_slots():
    own = model()
    cache = models.prefill(own, TOKENS, block=BLOCK).cache
    config, sizes = own.config, dict(kv_heads=2, query_heads=4, head_dim=16, layers=1, dtype="float32")
    made_of = recurrent.states_of(config, "float32")
    found = kvjax.memory(budget=48, block=0, recurrent=made_of, **sizes)
    assert (cache.heads_shape[0], len(cache.recurrent)) == (1, 3)
    assert found.recurrent == sum(leaf.nbytes for leaf in states(cache)) and found.total == cache.nbytes


def test_published_sizes_of_a_hybrid():
    published = json.loads((GOLDEN.parent / "published.json").read_text())
    config = from_hugging_face(published["Qwen3-Next-80B-A3B-Instruct"])
    assert config.cached_layers == tuple(range(3, 48, 4)) and config.rope.rotated(config.head_dim) == 64
    made_of = recurrent.states_of(config, "bfloat16")
    sizes = dict(layers=len(config.cached_layers), kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    found = kvjax.memory(budget=4096, block=128, recurrent=made_of, **sizes)
    assert found.recurrent == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    config = from_hugging_face(published["granite-4.0-h-tiny"])
    assert config.cached_layers == (5, 15, 25, 35) and config.rope.rotated(config.head_dim) == 0
    assert recurrent.states_of(config, "bfloat16")[0][1].shape == (48, 128, 64)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (QWEN, dict(layer_types=["linear_attention", "sliding_attention"] * 2), "layer_types"),
        (QWEN, dict(layer_types=["full_attention"] * 3), "layer_types has 3 entries; it must have one for each of 4"),
        (QWEN, dict(layer_types=["linear_attention"] * 4), "layers without attention are layers [0, 1, 2, 3] of 4; ex"),
        (QWEN, dict(layer_types=None, full_attention_interval=0), "full_attention_interval is 0; it must be a number"),
        (QWEN, dict(linear_num_value_heads=3), "3 value heads were given for 2 key heads of the layers without atten"),
        (QWEN, dict(linear_conv_kernel_dim=0), "kernel is 0"),
        (QWEN, dict(linear_key_head_dim="8"), "linear_key_head_dim is '8'"),
        (QWEN, dict(attn_output_gate=False), "attn_output_gate is False; expected True"),
        (
            QWEN,
            dict(output_gate_type="sigmoid"),
            "output_gate_type is 'sigmoid'; expected 'swish'",
        ),
        (QWEN, dict(partial_rotary_factor=None, rope_parameters=dict(partial_rotary_factor=0.2)), "partial_rotary_fa"),
        (QWEN, dict(shared_expert_intermediate_size=-1), "shared_size is -1; give a size, or 0 for no shared"),
        (GRANITE, dict(mamba_n_groups=3), "4 value heads were given for 3 key heads of the layers without attention"),
        (GRANITE, dict(mamba_n_heads=0, mamba_d_head="auto"), "value_heads is 0; give a positive integer"),
        (GRANITE, dict(mamba_n_heads=6), "mamba_n_heads * mamba_d_head is 48; expected mamba_expand * hidden_size, 32"),
        (GRANITE, dict(mamba_d_head="wide"), "value_dim is 'wide'"),
        (
            GRANITE,
            dict(position_embedding_type="alibi"),
            "is 'alibi'; expected 'rope' or 'nope'.",
        ),
        (GRANITE, dict(mamba_conv_bias=False), "mamba_conv_bias is False; expected True"),
        (GRANITE, dict(mamba_proj_bias=True), "mamba_proj_bias is True; expected False"),
        (
            GRANITE,
            dict(time_step_limit=[0.1, 1.0]),
            "time_step_limit is [0.1, 1.0]; expected [0.0, inf]",
        ),
        (GRANITE, dict(layer_types=["mamba", "mamba", "attention", "moe"]), "layer_types"),
        (GRANITE, dict(layer_types=None), "layers without attention are layers [0, 1, 2, 3] of 4; expected numbers"),
        (GRANITE, dict(shared_intermediate_size=0), "intermediate_size is 0"),
        (GRANITE, dict(num_local_experts=-1), "num_experts is -1; it must be a positive integer"),
    ],
)
def test_a_config_that_is_almost_right_is_refused_in_one_sentence(name, changes, said):
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        from_hugging_face(raw | changes)
    assert str(caught.value).endswith(".") and ". " not in str(caught.value)


def test_sizes_that_a_granite_leaves_out_are_those_of_transformers():
    raw = json.loads((GOLDEN / GRANITE / "config.json").read_text())
    assert from_hugging_face(raw | dict(mamba_d_head="auto")) == from_hugging_face(raw)
    fewer = {
        name: value
        for name, value in raw.items()
        if not name.startswith(("mamba", "num_local", "num_experts", "shared"))
    }
    config = from_hugging_face(fewer | dict(hidden_size=1024))
    assert dataclasses.astuple(config.recurrence) == ((0, 1, 3), 1, 128, 256, 16, 4, "state_space")
    assert (config.num_experts, config.shared_size) == (8, 1024)


def test_another_family_has_no_layers_with_linear_attention():
    raw = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    with pytest.raises(ValueError, match="layer_types is"):
        from_hugging_face(raw | dict(layer_types=["linear_attention"] * raw["num_hidden_layers"]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(policy="zap", budget=12), "'zap' reads a network that predicts (networks=) in every layer, but 3 of"),
        (dict(policy="kvgrad", budget=12), "'kvgrad' reads the gradient of a loss in every layer, but 3 of this"),
        (dict(select="oracle", budget=12), "this run reads select= in every layer, but 3 of this model's 4 layers"),
    ],
)
def test_what_reads_every_layer_is_refused(settings, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        models.generate(model(), TOKENS, block=8, **settings)


def test_a_state_that_does_not_fit_is_refused():
    one, wide = with_states(1), with_states(1)
    layer = kvjax.KVCache.of(np.zeros((1, 2, 9, 16)), np.zeros((1, 2, 9, 16)), np.full((1, 2, 9), -1), np.zeros(1, int))
    with pytest.raises(ValueError, match="its layers without a KV cache have other states"):
        models.prefill(model(), TOKENS, cache=dataclasses.replace(one, layers=(layer,)))
    with pytest.raises(ValueError, match="expected one row of the same model"):
        kvjax.join(one, 0, dataclasses.replace(wide, recurrent=({"memory": np.zeros((1, 5))},)))
    for made, said in (
        (models.ScorerConfig, "a scorer reads attention in"),
        (models.ButlerConfig, "a butler predicts"),
    ):
        with pytest.raises(ValueError, match=said):
            made.of(model().config)
    with pytest.raises(ValueError, match="no token can be taken back from layers without a KV cache"):
        kvjax.rewind(one, np.array([0]))
    with pytest.raises(ValueError, match="recurrent was given for a cache of one layer"):
        kvjax.memory(budget=4, kv_heads=1, head_dim=2, recurrent=((kvjax.RowArray("memory", (2,), "float32"),),))
    with pytest.raises(ValueError, match="2 value heads were given for 3 key heads"):
        dataclasses.replace(NET, key_heads=3, value_heads=2)
    with pytest.raises(ValueError, match=re.escape("layers [5] of 2; expected numbers of layers")):
        Config(8, 8, 8, 2, 2, 2, recurrence=dataclasses.replace(NET, layers=(5,)))
